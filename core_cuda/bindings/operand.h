// Turns Python arguments into views without copying and without owning anything past the call.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "diptych/ops.h"
#include "diptych/source.h"
#include "dlpack_abi.h"
#include "types.h"

namespace diptych::bind {

// Returns the DLPack exchange table of a tensor type, or null if it has none.
const dl::ExchangeApi* exchange_api(PyTypeObject* type);

bool dense(const dl::Tensor& t);

// Returns a device with the stream on which the framework of `api` works there.
Execution execution_on(const dl::ExchangeApi* api, dl::Device device);

// The views of one call. Accepts, for each tensor argument:
//   - an object whose type offers `__dlpack_c_exchange_api__` (torch tensors): borrowed through the C table;
//   - a pair (buffer, dtype code) for NumPy memory, since NumPy has no FP8 or bfloat16 dtypes;
//   - None, where the op allows it.
class Call {
 public:
  Call() = default;
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  TensorView in(py::handle object, const char* arg) { return view(object, arg, false); }
  TensorView out(py::handle object, const char* arg) { return view(object, arg, true); }

  // Returns the first tensor's device with the stream on which its framework works there.
  Execution execution();

  // Returns the tensor whose memory starts at `data`; null if there are several or none. Only while a Program records.
  py::handle object_at(const void* data) const;

 private:
  TensorView view(py::handle object, const char* arg, bool writable);
  TensorView from_buffer(py::handle pair, const char* arg, bool writable);

  static constexpr int kMaxBuffers = 16;
  Py_buffer buffers_[kMaxBuffers];
  int held_ = 0;
  bool have_device_ = false;
  Device device_;
  const dl::ExchangeApi* api_ = nullptr;
  std::vector<std::pair<const void*, py::handle>> objects_;  // filled only while a Program records
};

// Converts a number or flag of a tuple. A value that T cannot hold is a TypeError, as for pybind11's own arguments.
template <class T>
T scalar(py::handle value, const char* arg) {
  py::detail::make_caster<T> caster;
  if (!caster.load(value, true))
    throw py::type_error(std::string("argument '") + arg + "' cannot take " +
                         static_cast<std::string>(py::repr(py::type::handle_of(value))));
  return py::detail::cast_op<T>(caster);
}

// Returns one call of an op on many tensors. Throws TypeError unless it is a tuple of `count` entries.
inline py::tuple call_of(py::handle one, Py_ssize_t count, const char* op) {
  if (!PyTuple_Check(one.ptr()) || PyTuple_GET_SIZE(one.ptr()) != count)
    throw py::type_error(std::string(op) + ": each call must be a tuple of " + std::to_string(count) + " entries");
  return py::reinterpret_borrow<py::tuple>(one);
}

// Expand the options of products to parameters of a function, to their values, and to Python arguments.
#define DIPTYCH_PARAMETER(type, name) , type name
#define DIPTYCH_VALUE(type, name) name,
#define DIPTYCH_ARG(type, name) , py::arg(#name)

// Returns the id of a format. Throws ValueError if no format has that number.
inline FormatId known(int format) {
  if (valid(static_cast<FormatId>(format))) return static_cast<FormatId>(format);
  throw py::value_error("unknown format id " + std::to_string(format));
}

// Returns the view of one copy of a quantized tensor that an op reads.
QuantizedView operand(Call& call, py::handle data, py::handle scale, py::handle amax_buffer, int format,
                      bool columnwise, const char* arg);

}  // namespace diptych::bind
