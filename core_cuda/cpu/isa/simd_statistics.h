// The inner loop of statistics for one instruction set (NUMERICS 11).
#pragma once

#include "cpu/isa/simd.h"
#include "cpu/statistics/statistics.h"

namespace diptych::cpu {
inline namespace DIPTYCH_ISA {

using VD = double __attribute__((vector_size(4 * kLanes)));

// Returns the lower or upper half of the lanes as float64.
template <int half>
DIPTYCH_INLINE VD wide_half(VF x) {
  return [&]<int... i>(std::integer_sequence<int, i...>) DIPTYCH_LAMBDA {
    return __builtin_convertvector(__builtin_shufflevector(x, x, (half * kLanes / 2 + i)...), VD);
  }(std::make_integer_sequence<int, kLanes / 2>{});
}

DIPTYCH_INLINE int64_t sum_of_lanes(VI v) {
  int64_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// Adds at most 2^20 rows of kSumLanes elements. `smallest_normal`: bits of float32.
inline void add_rows(const float* x, int64_t rows, int32_t smallest_normal, LaneMoments* m) {
  VI largest = {}, zero = {}, nan = {}, infinite = {}, below = {};  // counts are negative: a true lane is -1
  for (int l = 0; l < kSumLanes; l += kLanes) {
    constexpr int kHalf = kLanes / 2;
    VD sum[2] = {load_as<VD>(m->sum + l), load_as<VD>(m->sum + l + kHalf)};
    VD squares[2] = {load_as<VD>(m->squares + l), load_as<VD>(m->squares + l + kHalf)};
    for (int64_t r = 0; r < rows; ++r) {
      const VI bits = load_as<VI>(x + r * kSumLanes + l), magnitude = bits & 0x7FFFFFFF;
      const VI finite = magnitude < kInfBits;
      zero += magnitude == 0;
      nan += magnitude > kInfBits;
      infinite += magnitude == kInfBits;
      below += magnitude < smallest_normal;  // zeros too
      const VI candidate = magnitude & finite;
      largest = candidate > largest ? candidate : largest;
      const VF value = bits_as<VF>(bits & finite);
      const VD v[2] = {wide_half<0>(value), wide_half<1>(value)};
      for (int h = 0; h < 2; ++h) sum[h] += v[h], squares[h] += v[h] * v[h];
    }
    for (int h = 0; h < 2; ++h) {
      __builtin_memcpy(m->sum + l + h * kHalf, &sum[h], sizeof(VD));
      __builtin_memcpy(m->squares + l + h * kHalf, &squares[h], sizeof(VD));
    }
  }
  for (int i = 0; i < kLanes; ++i) m->largest = m->largest > largest[i] ? m->largest : largest[i];
  const int64_t zeros = -sum_of_lanes(zero);
  m->zero += zeros, m->nan -= sum_of_lanes(nan), m->infinite -= sum_of_lanes(infinite);
  if (smallest_normal > 0) m->subnormal += -sum_of_lanes(below) - zeros;
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych::cpu
