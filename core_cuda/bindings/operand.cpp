#include "operand.h"

#include <bit>
#include <string>
#include <unordered_map>

#include "errors.h"
#include "program.h"

namespace diptych::bind {

// A cache of the tables by type (null: the type has none). The GIL guards it, and it keeps the types alive.
const dl::ExchangeApi* exchange_api(PyTypeObject* type) {
  static PyTypeObject* last_type = nullptr;
  static const dl::ExchangeApi* last_api = nullptr;
  if (type == last_type) return last_api;
  static auto* seen = new std::unordered_map<PyTypeObject*, const dl::ExchangeApi*>;
  auto it = seen->find(type);
  if (it == seen->end()) {
    const dl::ExchangeApi* api = nullptr;
    py::object capsule = py::getattr(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__", py::none());
    if (!capsule.is_none()) {
      api = static_cast<const dl::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dl::kCapsuleName));
      if (api == nullptr) throw py::error_already_set();
      while (api != nullptr && api->version.major != dl::kMajor)
        api = static_cast<const dl::ExchangeApi*>(api->previous);
      if (api == nullptr)
        throw py::type_error(std::string(type->tp_name) + " offers no DLPack exchange table of major version 1");
    }
    Py_INCREF(type);
    it = seen->emplace(type, api).first;
  }
  last_type = type;
  last_api = it->second;
  return last_api;
}

namespace {

bool find_dtype(const dl::DataType& d, DType* out) {
  for (const DTypeRow& r : kDTypes)
    if (r.dl_code == d.code && r.bytes * 8 == d.bits && d.lanes == 1) {
      *out = r.id;
      return true;
    }
  return false;
}

std::string who(const char* arg) { return std::string("argument '") + arg + "'"; }

// Refuses extents whose product overflows. Extents of 0 are left out, since products may be computed in any order.
void require_count(const TensorView& v, const char* arg) {
  int64_t bytes = diptych::bytes(v.dtype);
  for (int i = 0; i < v.rank; ++i)
    if (v.shape[i] < 0 || (v.shape[i] > 0 && __builtin_mul_overflow(bytes, v.shape[i], &bytes)))
      throw py::value_error(who(arg) + " has extents whose product does not fit int64");
}

bool foreign_order(char order) {  // a byte order of the struct module
  const char foreign = std::endian::native == std::endian::little ? '>' : '<';
  return order == foreign || (order == '!' && foreign == '>');
}

bool dense(const int64_t* shape, const int64_t* strides, int rank, int64_t unit) {
  int64_t expect = unit;
  for (int i = 0; i < rank; ++i)
    if (shape[i] == 0) return true;
  for (int i = rank - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[i] != expect) return false;
    expect *= shape[i];
  }
  return true;
}

}  // namespace

bool dense(const dl::Tensor& t) { return t.strides == nullptr || dense(t.shape, t.strides, t.ndim, 1); }

Execution execution_on(const dl::ExchangeApi* api, dl::Device device) {
  Execution e{{static_cast<Backend>(device.type), device.type == 1 ? 0 : device.id}, nullptr};
  if (e.device.backend == Backend::cuda && api->current_work_stream(device.type, e.device.index, &e.stream) != 0)
    throw py::error_already_set();
  return e;
}

Call::~Call() {
  for (int i = 0; i < held_; ++i) PyBuffer_Release(&buffers_[i]);
}

TensorView Call::view(py::handle object, const char* arg, bool writable) {
  if (object.is_none()) return {};
  if (PyTuple_CheckExact(object.ptr())) return from_buffer(object, arg, writable);
  const dl::ExchangeApi* api = exchange_api(Py_TYPE(object.ptr()));
  if (api == nullptr)
    throw py::type_error(who(arg) + " of type " + Py_TYPE(object.ptr())->tp_name +
                         " is neither a tensor with a DLPack exchange table nor a (buffer, dtype code) pair");
  dl::Tensor t;
  if (api->tensor_from_object(object.ptr(), &t) != 0) throw py::error_already_set();
  TensorView v;
  if (t.ndim > kMaxRank) throw py::value_error(who(arg) + " has more than 8 dimensions");
  if (t.device.type != 1 && t.device.type != 2)
    throw py::value_error(who(arg) + " is on a device of DLPack type " + std::to_string(t.device.type) +
                          "; there are backends for the CPU (1) and CUDA (2)");
  if (!find_dtype(t.dtype, &v.dtype))
    raise("DTypeError", who(arg) + " has a dtype that no op takes (DLPack code " + std::to_string(t.dtype.code) + ", " +
                            std::to_string(t.dtype.bits) + " bits, " + std::to_string(t.dtype.lanes) + " lanes)");
  v.data = static_cast<char*>(t.data) + t.byte_offset;
  v.rank = t.ndim;
  for (int i = 0; i < t.ndim; ++i) v.shape[i] = t.shape[i];
  v.device = {static_cast<Backend>(t.device.type), t.device.type == 1 ? 0 : t.device.id};
  require_count(v, arg);
  v.contiguous = dense(t);
  if (Program::recording()) objects_.emplace_back(v.data, object);
  if (!have_device_) {
    have_device_ = true;
    device_ = v.device;
    api_ = api;
  }
  return v;
}

TensorView Call::from_buffer(py::handle pair, const char* arg, bool writable) {
  if (PyTuple_GET_SIZE(pair.ptr()) != 2) throw py::type_error(who(arg) + " must be a (buffer, dtype code) pair");
  int overflow = 0;  // Python integers may be larger than a long
  const long code = PyLong_AsLongAndOverflow(PyTuple_GET_ITEM(pair.ptr(), 1), &overflow);
  if (code == -1 && PyErr_Occurred()) throw py::error_already_set();
  if (overflow != 0 || code < 0 || code >= static_cast<long>(DType::count_))
    throw py::type_error(who(arg) + ": unknown dtype code");
  if (held_ == kMaxBuffers) throw py::value_error("too many buffers in one call");
  Py_buffer& b = buffers_[held_];
  const int wanted = PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(PyTuple_GET_ITEM(pair.ptr(), 0), &b, wanted) != 0) throw py::error_already_set();
  ++held_;
  TensorView v;
  v.dtype = static_cast<DType>(code);
  if (b.itemsize != bytes(v.dtype))
    throw py::type_error(who(arg) + " has elements of " + std::to_string(b.itemsize) + " bytes, " + name(v.dtype) +
                         " has " + std::to_string(bytes(v.dtype)));
  if (b.format != nullptr && b.itemsize > 1 && foreign_order(b.format[0]))  // cheap: every NumPy array passes here
    raise("DTypeError", who(arg) + " is " + (b.format[0] == '<' ? "little" : "big") +
                            "-endian, the other byte order than this machine's; use "
                            "x.astype(x.dtype.newbyteorder('='))");
  if (b.ndim > kMaxRank) throw py::value_error(who(arg) + " has more than 8 dimensions");
  v.data = b.buf;
  v.rank = b.ndim;
  int64_t strides[kMaxRank] = {};
  for (int i = 0; i < b.ndim; ++i) {
    v.shape[i] = b.shape[i];
    if (b.strides != nullptr) strides[i] = b.strides[i];  // ctypes arrays have no strides
  }
  require_count(v, arg);
  v.contiguous = b.strides == nullptr || dense(v.shape, strides, v.rank, b.itemsize);
  if (!have_device_) {
    have_device_ = true;
    device_ = v.device;
  }
  return v;
}

Execution Call::execution() { return execution_on(api_, {static_cast<int32_t>(device_.backend), device_.index}); }

py::handle Call::object_at(const void* data) const {
  py::handle found;
  for (const auto& [at, object] : objects_)
    if (at == data) {
      if (found && found.ptr() != object.ptr()) return {};
      found = object;
    }
  return found;
}

QuantizedView operand(Call& call, py::handle data, py::handle scale, py::handle amax_buffer, int format,
                      bool columnwise, const char* arg) {
  QuantizedView q;
  q.format = static_cast<FormatId>(format);
  q.columnwise = columnwise;
  q.data = call.in(data, arg);
  q.scale_inv = call.in(scale, arg);
  q.amax = call.in(amax_buffer, arg);
  return q;
}

}  // namespace diptych::bind
