// Stochastic rounding to E2M1 (NUMERICS 5).
#pragma once

#include "cuda/base/e2m1.cuh"
#include "cuda/quantize/philox.cuh"

namespace diptych::cuda {

// Returns two floats as halves, rounded towards zero, the first in the lower half of the word.
__device__ __forceinline__ uint32_t halves_rz(float low, float high) {
  uint32_t two;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}

// Returns a * 2^-14 + 2^-40, rounded towards zero. Where the rule rounds the sum of a < 1/4 and its random part up to
// 1/2, the addend carries it there too; elsewhere nothing is left of the addend.
__device__ __forceinline__ float as_half_code(float a) { return __fmaf_rz(a, 0x1p-14f, 0x1p-40f); }

// Returns the codes of two elements in bits 12..15 and 28..31; the lower bytes of each half of `r` are their random
// bytes, the upper ones 0.
//
// The bits of the half 2^-14 v are, for a value v of E2M1, its code in bits 9 and above, also where the half is
// subnormal; between two values they grow linearly by 512. Hence 2 r + 1, which is 512 (r + .5) / 256, is a random part
// of one step, and since thresholds are whole numbers, the other bits of v do not matter.
__device__ __forceinline__ uint32_t dithered_pair(float first, float second, uint32_t r) {
  const uint32_t two = halves_rz(as_half_code(first), as_half_code(second));
  __half2 h;
  memcpy(&h, &two, sizeof(h));
  h = __hmin2(h, __half2(__half2_raw{7 << 9, 7 << 9}));  // 6: no random part lifts it
  uint32_t codes;
  memcpy(&codes, &h, sizeof(codes));
  return codes * 8 + (r * 16 + 0x00080008);
}

// Returns the packed codes of eight elements of magnitude a(j), NaN as 6. r0 and r1 hold their random bytes; the top
// bits of the bytes of signs.x are the signs of elements 0, 2, 4, 6, those of signs.y of 1, 3, 5, 7.
template <typename Magnitude>
__device__ __forceinline__ uint32_t e2m1_dithered8(uint2 signs, uint32_t r0, uint32_t r1, Magnitude&& a) {
  constexpr uint32_t kSigns = 0x80808080;
  const auto four = [&](int j) {  // the codes of elements j, j + 2, j + 4, j + 6 in the upper halves of bytes
    const unsigned bytes = j == 0 ? 0x4240 : 0x4341;
    const uint32_t lower = dithered_pair(a(j), a(j + 2), __byte_perm(r0, 0, bytes));
    const uint32_t upper = dithered_pair(a(j + 4), a(j + 6), __byte_perm(r1, 0, bytes));
    return __byte_perm(lower, upper, 0x7531);
  };
  return packed_nibbles((four(0) & ~kSigns) | (signs.x & kSigns), (four(1) & ~kSigns) | (signs.y & kSigns));
}

}  // namespace diptych::cuda
