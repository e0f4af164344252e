// E2M1 (NUMERICS 1, 5): codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6 and bit 3 is the sign; eight codes to a word, the
// first lowest. Only sm_100 converts to it in hardware.
#pragma once

#include "cuda/base/codec.cuh"

namespace diptych::cuda {

// Returns a * factor + whole, rounded to nearest even; |whole| is so large that the last bit is worth 1.
DIPTYCH_HD float whole_sum(float a, float factor, float whole) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, factor, whole);
#else
  return static_cast<float>(static_cast<double>(a) * factor + whole);  // 29 bits behind the point: enough to tell a tie
#endif
}

// Returns the bits of the float 2^23 + the code of the value nearest to a, ties to even codes, for 0 <= a < 7.
//
// The code as a function of a is the minimum of three lines, 2a, a + 2 and a / 2 + 4. Rounding commutes with taking the
// minimum, and adding 2^23 rounds.
DIPTYCH_HD uint32_t e2m1_code(float a) {
  constexpr float kWhole = 8388608.0f;
  const uint32_t fine = bits_of(whole_sum(a, 2.0f, kWhole));
  const uint32_t middle = bits_of(whole_sum(a, 1.0f, kWhole + 2.0f));
  const uint32_t coarse = bits_of(whole_sum(a, 0.5f, kWhole + 4.0f));
  const uint32_t lower = fine < middle ? fine : middle;  // positive floats order as their bits do
  return lower < coarse ? lower : coarse;
}

// Returns a word of eight nibbles: the upper halves of the bytes of `even` in places 0, 2, 4, 6, those of `odd` in 1,
// 3, 5, 7.
DIPTYCH_HD uint32_t packed_nibbles(uint32_t even, uint32_t odd) {
  return (even >> 4 & 0x0f0f0f0f) | (odd & 0xf0f0f0f0);
}

// Packs the codes of eight elements into a word: code(j) is the result of e2m1_code, `signs` holds the sign bits in
// place.
template <typename Code>
DIPTYCH_HD uint32_t e2m1_pack8(uint32_t signs, Code&& code) {
  constexpr uint32_t kWholes = 0xfb000000u;  // what the 2^23 of the two lowest codes leave in the word
  uint32_t w = code(7);
#pragma unroll
  for (int j = 6; j >= 0; --j) w = w * 16 + code(j);
  return w + (signs - kWholes);
}

DIPTYCH_HD float e2m1_decode(uint32_t code) {
  return float_of((code & 7) << 22 | (code & 8) << 28) * 0x1p126f;  // the bits are those of the value times 2^-126
}

// Two codes (the second in bits 4..7) -> two bfloat16 of 2^-126 times the values, the first in the lower half.
DIPTYCH_HD uint32_t e2m1_pair_bits(uint32_t two) {
  // Each multiplication shifts by two amounts at once; the shifted parts do not overlap.
  return (two * 0x00040040u & 0x01c001c0u) | (two * 0x01001000u & 0x80008000u);
}

}  // namespace diptych::cuda
