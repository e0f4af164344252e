#include "errors.h"

#include <pybind11/pybind11.h>

#include <stdexcept>

namespace py = pybind11;

namespace diptych::bind {

void raise(const char* error, const std::string& message) {
  const py::object type = py::module_::import("diptych.common.errors").attr(error);
  PyErr_SetString(type.ptr(), message.c_str());
  throw py::error_already_set();
}

void finish(const Status& s, const WarningCollector& warnings) {
  // An exception that a signal handler raised comes first, even if the op has failed for another reason.
  if (s.code() == Code::interrupted || PyErr_Occurred()) throw py::error_already_set();
  for (const std::string& message : warnings.messages()) {
    const py::object category = py::module_::import("diptych.common.errors").attr("EmulationWarning");
    if (PyErr_WarnEx(category.ptr(), message.c_str(), 1) != 0) throw py::error_already_set();
  }
  switch (s.code()) {
    case Code::ok:
    case Code::interrupted:
      return;
    case Code::value:
      throw py::value_error(s.message());
    case Code::shape:
      raise("ShapeError", s.message());
    case Code::device:
      raise("DeviceError", s.message());
    case Code::type:
      raise("DTypeError", s.message());
    case Code::argument:
      raise("ArgumentError", s.message());
    case Code::unsupported:
      raise("UnsupportedError", s.message());
    case Code::runtime:
      throw std::runtime_error(s.message());
  }
}

}  // namespace diptych::bind
