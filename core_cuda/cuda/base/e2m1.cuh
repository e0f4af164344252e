// E2M1 (NUMERICS 1, 5): codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6 and bit 3 is the sign; eight codes to a word, the
// first lowest. Only sm_100 converts to it in hardware.
#pragma once

#include "cuda/base/codec.cuh"

namespace diptych::cuda {

constexpr float kE2M1Max = 6.0f;

// Returns a * factor + whole, rounded to nearest even or downwards; |whole| is so large that the last bit is worth 1.
template <bool kDown>
DIPTYCH_HD float whole_sum(float a, float factor, float whole) {
#ifdef __CUDA_ARCH__
  return kDown ? __fmaf_rd(a, factor, whole) : __fmaf_rn(a, factor, whole);
#else
  const double exact = static_cast<double>(a) * factor + whole;  // 29 bits behind the point: enough to tell a tie
  return static_cast<float>(kDown ? floor(exact) : nearbyint(exact));
#endif
}

// Returns the bits of the float 2^23 + code, for 0 <= a < 7. The code is that of the value nearest to a, ties to even
// codes, or with kDown of the largest value that is not above a.
//
// The code as a function of a is the minimum of three lines, 2a, a + 2 and a / 2 + 4. Rounding commutes with taking the
// minimum, and adding 2^23 rounds.
template <bool kDown>
DIPTYCH_HD uint32_t e2m1_code(float a) {
  constexpr float kWhole = 8388608.0f;
  const uint32_t fine = bits_of(whole_sum<kDown>(a, 2.0f, kWhole));
  const uint32_t middle = bits_of(whole_sum<kDown>(a, 1.0f, kWhole + 2.0f));
  const uint32_t coarse = bits_of(whole_sum<kDown>(a, 0.5f, kWhole + 4.0f));
  const uint32_t lower = fine < middle ? fine : middle;  // positive floats order as their bits do
  return lower < coarse ? lower : coarse;
}

// Returns the value that e2m1_code must round down to round `a` stochastically: a + (byte + .5) / 256 * the step at a,
// at most 6. The random byte is given as the bits of the float 2^23 + byte.
DIPTYCH_HD float e2m1_dithered(float a, uint32_t byte_bits) {
  const float half_u = (float_of(byte_bits) - 8388607.5f) * (1.0f / 512.0f);  // exact
  const float two_steps = float_of(bits_of(fmaxf(a, 1.0f)) & 0x7f800000);     // from 8 on any step will do
  return fminf(a + half_u * two_steps, kE2M1Max);                             // the product is exact
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
