// The part of DLPack's C ABI that the bindings read, written out from the published specification (version 1.x).
// Sizes and offsets are asserted, and a test compares them with the header that a framework ships.
#pragma once

#include <cstddef>
#include <cstdint>

namespace diptych::dl {

struct Version {
  uint32_t major, minor;
};

struct Device {
  int32_t type;  // 1: CPU, 2: CUDA
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // null: dense row-major
  uint64_t byte_offset;
};

// The function table behind a tensor type's `__dlpack_c_exchange_api__` capsule. Unused entries are opaque.
struct ExchangeApi {
  Version version;
  void* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, Tensor* out);  // borrows; -1 with an exception set
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out);
};

static_assert(sizeof(Tensor) == 48 && offsetof(Tensor, dtype) == 20 && offsetof(Tensor, byte_offset) == 40);
static_assert(sizeof(ExchangeApi) == 56 && offsetof(ExchangeApi, tensor_from_object) == 40);

inline constexpr char kCapsuleName[] = "dlpack_exchange_api";
inline constexpr uint32_t kMajor = 1;

}  // namespace diptych::dl
