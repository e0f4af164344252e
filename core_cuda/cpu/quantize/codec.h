// Element codecs, branchless (NUMERICS 1). Each is written once for a scalar (float, int32_t) and for a vector of them.
// They rely on the IEEE float environment: subnormals are rounded by adding a power of two.
#pragma once

#include <cstdint>

// Every instruction set compiles its own copy of this file, so that the linker cannot use one set's code for another.
#ifndef DIPTYCH_ISA
#define DIPTYCH_ISA baseline
#define DIPTYCH_LANES 1
#endif
#define DIPTYCH_INLINE inline __attribute__((always_inline))

namespace diptych::cpu {
inline namespace DIPTYCH_ISA {

template <class To, class From>
DIPTYCH_INLINE To bits_as(From v) {
  return __builtin_bit_cast(To, v);
}
DIPTYCH_INLINE constexpr float pow2f(int e) { return __builtin_bit_cast(float, static_cast<uint32_t>(e + 127) << 23); }
template <class F, class I>
DIPTYCH_INLINE F to_float(I v) {
  if constexpr (sizeof(F) == sizeof(float)) {
    return static_cast<F>(v);
  } else {
    return __builtin_convertvector(v, F);
  }
}

inline constexpr int32_t kInfBits = 0x7F800000;

struct E4M3 {
  static constexpr int kMantissa = 3, kBias = 7, kBits = 7;  // kBits: without the sign
  static constexpr int32_t kMaxBits = 0x43E00000;            // 448
  static constexpr int32_t kFirstSpecial = 0x7F;             // its only NaN
  static constexpr int32_t kSpecialBase = 0x7FC00000;
};
struct E5M2 {
  static constexpr int kMantissa = 2, kBias = 15, kBits = 7;
  static constexpr int32_t kMaxBits = 0x47600000;  // 57344
  static constexpr int32_t kFirstSpecial = 0x7C;   // inf, then NaNs
  static constexpr int32_t kSpecialBase = kInfBits;
};
struct E2M1 {  // no NaN, no inf
  static constexpr int kMantissa = 1, kBias = 1, kBits = 3;
  static constexpr int32_t kMaxBits = 0x40C00000;  // 6
};

// Returns the low `bits` of code with the sign of u above them. Where |u| is above `largest` (both as bits), returns
// all `bits` set and no sign.
template <int bits, int32_t largest, class I>
DIPTYCH_INLINE I finish_code(I code, I u, I magnitude) {
  constexpr int kLow = (1 << bits) - 1;
#if DIPTYCH_LANES == 16 && defined(__x86_64__)
  if constexpr (sizeof(I) == 64) {  // one instruction selects bits and lanes
    const __m512i low = _mm512_set1_epi32(kLow), sign = _mm512_srli_epi32((__m512i)u, 31 - bits);
    const __mmask16 number = _mm512_cmple_epi32_mask((__m512i)magnitude, _mm512_set1_epi32(largest));
    return (I)_mm512_mask_ternarylogic_epi32(low, number, (__m512i)code, sign, 0xCA);
  }
#endif
  return magnitude > largest ? kLow : (code & kLow) | ((u >> (31 - bits)) & (kLow + 1));
}

// float32 -> code of a small element, round to nearest even, saturating; any NaN -> all bits but the sign, and with
// `inf_is_nan` infinity too
//
// Let p be the largest power of two that is at most a, but at least the element's smallest normal. In the float sum
// a + 2^kDrop * p, one unit in the last place is one step of the element's grid at a, so the addition rounds a to that
// grid, subnormals included. The sum's last bits are the code's mantissa, and its exponent, shifted down and added, is
// the code's exponent. kAlign, an even number of steps, is added too, so that the two biases cancel in the low 7 bits.
template <class E, class I, bool inf_is_nan = false, class F>
DIPTYCH_INLINE I encode(F x) {
  constexpr int kDrop = 23 - E::kMantissa;
  constexpr int32_t kMinNormal = (128 - E::kBias) << 23;
  constexpr int32_t kAlign = -((128 - E::kBias + kDrop) << E::kMantissa) & 0x7F;
  static_assert(kAlign % 2 == 0);
  const I u = bits_as<I>(x);
  const I magnitude = u & 0x7FFFFFFF;
  const I a = magnitude > E::kMaxBits ? E::kMaxBits : magnitude;
  const I power = a & kInfBits;
  const I grid = (power > kMinNormal ? power : kMinNormal) + (kAlign + (kDrop << 23));
  const I sum = bits_as<I>(bits_as<F>(a) + bits_as<F>(grid));
  return finish_code<E::kBits, inf_is_nan ? kInfBits - 1 : kInfBits>(sum + (sum >> kDrop), u, magnitude);
}

// float32 -> E2M1 code, rounded down on the grid after u steps were added (NUMERICS 5, stochastic rounding); NaN -> 7
template <class I, class F>
DIPTYCH_INLINE I encode_e2m1_after(F x, F u) {
  constexpr int32_t kHalf = 0x3F000000, kOne = 0x3F800000, kFour = 0x40800000;
  const I bits = bits_as<I>(x);
  const I magnitude = bits & 0x7FFFFFFF;
  const I power = magnitude & kInfBits;
  const I least = power > kOne ? power : kOne;
  const I step = (least < kFour ? least : kFour) - (1 << 23);  // half the power of two below, between 1/2 and 2
  const I sum = bits_as<I>(bits_as<F>(magnitude) + u * bits_as<F>(step));
  const I t = sum < E2M1::kMaxBits ? sum : E2M1::kMaxBits;
  const I below_one = t < kHalf ? 0 : 1;
  return finish_code<E2M1::kBits, kInfBits>(t < kOne ? below_one : (t >> 22) - ((kOne >> 22) - 2), bits, magnitude);
}

// FP8 byte -> float32, exact
template <class E, class F, class I>
DIPTYCH_INLINE F decode(I code) {
  constexpr int kDrop = 23 - E::kMantissa;
  constexpr float kStep = pow2f(1 - E::kBias - E::kMantissa);
  const I a = code & 0x7F;
  const I normal = (a << kDrop) + ((127 - E::kBias) << 23);
  const I special = E::kSpecialBase | (((a - E::kFirstSpecial) & 3) << kDrop);
  const I finite = a < (1 << E::kMantissa) ? bits_as<I>(to_float<F>(a) * kStep) : normal;
  return bits_as<F>((a < E::kFirstSpecial ? finite : special) | ((code & 0x80) << 24));
}

// float32 -> bfloat16, round to nearest even, overflow to inf, NaN stays NaN
template <class I, class F>
DIPTYCH_INLINE I to_bf16(F x) {
  const I u = bits_as<I>(x);
  const I a = u & 0x7FFFFFFF;
  const I s = a < kInfBits ? a : kInfBits;
  const I rounded = (s + ((s >> 16) & 1) + 0x7FFF) >> 16;
  return (a > kInfBits ? 0x7FC0 : rounded) | ((u >> 16) & 0x8000);
}

template <class F, class I>
DIPTYCH_INLINE F from_bf16(I half) {
  return bits_as<F>(half << 16);
}

// float32 -> float16, round to nearest even, overflow to inf, NaN stays NaN
template <class I, class F>
DIPTYCH_INLINE I to_f16(F x) {
  constexpr float kMagic = 0.5f;  // its ulp is 2^-24, the smallest float16
  const I u = bits_as<I>(x);
  const I a = u & 0x7FFFFFFF;
  const I s = a < 0x47800000 ? a : 0x47800000;  // 2^16 rounds to inf
  const I normal = (s + ((s >> 13) & 1) + (0xFFF - (112 << 23))) >> 13;
  const I subnormal = bits_as<I>(bits_as<F>(s) + kMagic) - bits_as<int32_t>(kMagic);
  const I finite = s < (113 << 23) ? subnormal : normal;
  return (a > kInfBits ? 0x7E00 : finite) | ((u >> 16) & 0x8000);
}

template <class F, class I>
DIPTYCH_INLINE F from_f16(I half) {
  const I a = half & 0x7FFF;
  const I normal = (a << 13) + (112 << 23);
  const I finite = a < 0x400 ? bits_as<I>(to_float<F>(a) * pow2f(-24)) : normal;
  return bits_as<F>((a < 0x7C00 ? finite : (a << 13) | kInfBits) | ((half & 0x8000) << 16));
}

// v = amax / max of the element, >= 0 and not NaN -> the E8M0 code of the next power of two (NUMERICS 4)
template <class I, class F>
DIPTYCH_INLINE I e8m0_ceil(F v) {
  const I u = bits_as<I>(v);
  const I e = u >> 23;
  const I m = u & 0x7FFFFF;
  const I up = (m > 0) & (e != 254) & ((e != 0) | (m > 0x400000)) ? e + 1 : e;
  return e == 255 ? 254 : up;
}

// 2^(127 - code), the multiplier of a block; integer arithmetic, as 2^-127 is subnormal
template <class F, class I>
DIPTYCH_INLINE F e8m0_inverse(I code) {
  return bits_as<F>(code == 254 ? 0x00400000 : (254 - code) << 23);
}

// 2^(code - 127); 255 is NaN
DIPTYCH_INLINE float from_e8m0(uint8_t code) {
  const uint32_t u = code == 255 ? 0x7FC00000u : code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23;
  return bits_as<float>(u);
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych::cpu
