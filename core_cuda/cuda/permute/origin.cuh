// The tokens that destination rows come from: `row_source` of permute.h holds entries t * slots + slot.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "diptych/tensor.h"

namespace diptych::cuda {

// Computes n / d for n < 2^31 with one multiplication.
struct Divider {
  uint32_t factor = 0;
  int shift = 0;

  Divider() = default;  // divides by 1
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
  uint32_t none = 0;  // the number of tokens, returned for absent rows

  Origins() = default;
  Origins(const TensorView& rows, int64_t slots_of_a_token, int64_t tokens)
      : row_source(rows.as<const int>()),
        slots(static_cast<uint32_t>(slots_of_a_token)),
        none(static_cast<uint32_t>(tokens)) {}
  // Returns the token of an entry, or `none`.
  __device__ __forceinline__ uint32_t of(int entry) const {
    return entry < 0 ? none : min(slots(static_cast<uint32_t>(entry)), none);
  }
  __device__ __forceinline__ uint32_t at(int64_t row) const { return of(__ldg(row_source + row)); }
};

}  // namespace diptych::cuda
