// The Hadamard transform of 16 consecutive rows with fixed random signs (NUMERICS 5), in this order of operations.
#pragma once

#include "cuda/base/scale.cuh"

namespace diptych::cuda {

constexpr int kHadamard = 16;

// z <- H (s * z) / 4; `signs`: random signs s, else ones. The quarter is exact, each sum rounds once.
DIPTYCH_HD void hadamard16(float (&z)[kHadamard], bool signs) {
  constexpr uint32_t kNegative = 0xd7e8;  // bit i: s_i is -1
  const float turned = signs ? -0.25f : 0.25f;
#pragma unroll
  for (int i = 0; i < kHadamard; i += 2) {
    const auto quarter = [&](int j) { return kNegative >> j & 1 ? turned : 0.25f; };
    const float low = z[i], high = z[i + 1] * quarter(i + 1);
    z[i] = add_exact_product(low, quarter(i), high), z[i + 1] = add_exact_product(low, quarter(i), -high);
  }
#pragma unroll
  for (int h = 2; h < kHadamard; h *= 2) {
#pragma unroll
    for (int i = 0; i < kHadamard; ++i) {
      if (i & h) continue;
      const float low = z[i], high = z[i + h];
      z[i] = low + high, z[i + h] = low - high;
    }
  }
}

}  // namespace diptych::cuda
