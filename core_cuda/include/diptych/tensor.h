// Views, which kernels get as operands. A view owns no memory; the caller keeps it alive and allocates every output.
#pragma once

#include <cstdint>

#include "diptych/dtype.h"

namespace diptych {

inline constexpr int kMaxRank = 8;

enum class Backend : int32_t { cpu = 1, cuda = 2 };  // DLDeviceType's numbers

struct Device {
  Backend backend = Backend::cpu;
  int32_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

// A dense row-major tensor. Ops fold leading dimensions into rows and read it as [rows, cols].
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  int32_t rank = -1;  // -1: no tensor was given
  int64_t shape[kMaxRank] = {};
  Device device;
  bool contiguous = true;

  bool given() const { return rank >= 0; }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
  int64_t cols() const { return rank > 0 ? shape[rank - 1] : 1; }
  int64_t rows() const {
    int64_t n = 1;
    for (int i = 0; i + 1 < rank; ++i) n *= shape[i];
    return n;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// What an op does with a tensor. The `fields` functions of argument structs call f(tensor, role) for each tensor, or
// f(tensor) for an input. in_place: the op also writes the tensor, or an output may be this tensor.
enum class Role : int32_t { input, output, in_place, workspace };

// The device and the stream that an op runs on. `stream` is a cudaStream_t on CUDA and unused on the CPU.
struct Execution {
  Device device;
  void* stream = nullptr;
};

}  // namespace diptych
