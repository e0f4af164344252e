// Where the rows of a destination come from (permute.h's `row_source`): entries t * slots + slot.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "diptych/tensor.h"

namespace diptych::cuda {

// n / d for n < 2^31: one multiplication.
struct Divider {
  uint32_t factor = 0;
  int shift = 0;

  Divider() = default;  // by 1
  explicit Divider(uint32_t d) {
    if (d <= 1) return;
    int bits = 1;
    while ((uint64_t{1} << bits) < d) ++bits;
    factor = static_cast<uint32_t>(((uint64_t{1} << (31 + bits)) + d - 1) / d);
    shift = bits - 1;
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t n) const {
    return factor == 0 ? n : __umulhi(n, factor) >> shift;
  }
};

struct Origins {
  const int* row_source = nullptr;
  Divider slots;
  uint32_t none = 0;  // as many as there are tokens

  Origins() = default;
  Origins(const TensorView& rows, int64_t slots_of_a_token, int64_t tokens)
      : row_source(rows.as<const int>()),
        slots(static_cast<uint32_t>(slots_of_a_token)),
        none(static_cast<uint32_t>(tokens)) {}
  // The token of an entry, or `none`.
  __device__ __forceinline__ uint32_t of(int entry) const {
    return entry < 0 ? none : min(slots(static_cast<uint32_t>(entry)), none);
  }
  __device__ __forceinline__ uint32_t at(int64_t row) const { return of(__ldg(row_source + row)); }
};

}  // namespace diptych::cuda
