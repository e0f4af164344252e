// Types of arguments and results that pybind11 cannot name. Signatures use these names, and stub.py writes the stub
// from signatures.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

#include <string_view>
#include <type_traits>

namespace diptych::bind {

namespace py = pybind11;

// Tensor arguments as Python passes them; operand.h lists what they may be. Contracts refuse None if an op needs a
// tensor.
struct Operand : py::handle {};
struct MaybeOperand : py::handle {};

// The source of quantize and amax: None, (kind, norm or activation, zero_centered_gamma or gated, gamma, beta, mu,
// rsigma, dy), or for permuted rows (kind, row_id_map, row_source).
struct MaybeSource : py::handle {};

// The tensors that permute moves: (input, output, four bytes that absent rows repeat) for each.
class Planes : public py::sequence {
  PYBIND11_OBJECT_DEFAULT(Planes, sequence, PySequence_Check)
};

// The calls of an op on many tensors: for each a tuple of the operands.
class Calls : public py::sequence {
  PYBIND11_OBJECT_DEFAULT(Calls, sequence, PySequence_Check)
};

// The outputs of Program.run, or None.
struct MaybeOperands : py::object {
  MaybeOperands(py::object results) : py::object(std::move(results)) {}
};

// Arguments of Program.seal.
using Operands = py::typing::List<Operand>;
using Views = py::typing::List<py::typing::Tuple<Operand, Operand, int>>;
using Makers = py::typing::List<
    py::typing::Tuple<py::typing::Callable<Operand(py::ellipsis)>, py::typing::Tuple<int, py::ellipsis>>>;
using MakeWorkspace = py::typing::Callable<Operand(int)>;

using Numbers = py::typing::Dict<py::str, int>;

// Record<T> makes a struct T a dict in Python and a TypedDict in the stub. It has `name`, the type's name as a
// pybind11::detail::descr, and `entries(const T&, f)`, which calls f with the key and the value of each entry.
template <typename T>
struct Record;

template <typename T>
concept IsRecord = requires { Record<T>::name; };

template <typename T>
py::object python_type(const T&) {
  if constexpr (std::is_same_v<T, bool>)
    return py::type::of(py::bool_());
  else if constexpr (std::is_integral_v<T>)
    return py::type::of(py::int_());
  else if constexpr (std::is_floating_point_v<T>)
    return py::type::of(py::float_());
  else if constexpr (std::is_convertible_v<T, std::string_view>)
    return py::type::of(py::str());
  else if constexpr (std::is_same_v<T, Numbers>)
    return py::type::of(py::dict())[py::make_tuple(python_type(""), python_type(0))];
  else
    return py::type::of(py::list())[python_type(typename T::value_type())];
}

// Adds the TypedDict of a record to the module.
template <IsRecord T>
void add_record(py::module_& m) {
  py::dict types;
  Record<T>::entries(T(), [&](const char* key, const auto& value) { types[key] = python_type(value); });
  m.attr(Record<T>::name.text) = py::module_::import("typing").attr("TypedDict")(Record<T>::name.text, types);
}

}  // namespace diptych::bind

namespace pybind11::detail {

#define DIPTYCH_ARGUMENT(Type, text)              \
  template <>                                     \
  struct type_caster<Type> {                      \
    PYBIND11_TYPE_CASTER(Type, const_name(text)); \
    bool load(handle object, bool) {              \
      value = Type{object};                       \
      return static_cast<bool>(object);           \
    }                                             \
  }
DIPTYCH_ARGUMENT(diptych::bind::Operand, "Operand");
DIPTYCH_ARGUMENT(diptych::bind::MaybeOperand, "Operand | None");
DIPTYCH_ARGUMENT(diptych::bind::MaybeSource,
                 "tuple[int, int, bool, Operand | None, Operand | None, Operand | None, Operand | None, Operand | None]"
                 " | tuple[int, Operand, Operand] | None");
#undef DIPTYCH_ARGUMENT

template <>
struct handle_type_name<diptych::bind::Planes> {
  static constexpr auto name = const_name("collections.abc.Sequence[tuple[Operand, Operand, int]]");
};
template <>
struct handle_type_name<diptych::bind::Calls> {
  static constexpr auto name = const_name("collections.abc.Sequence[tuple[typing.Any, ...]]");
};
template <>
struct handle_type_name<diptych::bind::MaybeOperands> {
  static constexpr auto name = const_name("list[Operand] | None");
};

template <diptych::bind::IsRecord T>
struct type_caster<T> {
  static constexpr auto name = diptych::bind::Record<T>::name;
  static handle cast(const T& record, return_value_policy, handle) {
    dict d;
    diptych::bind::Record<T>::entries(record, [&](const char* key, const auto& value) { d[key] = value; });
    return d.release();
  }
};

}  // namespace pybind11::detail
