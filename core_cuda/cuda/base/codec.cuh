// FP8 and E8M0, bit by bit (NUMERICS 1, 4), on the device and on the host, where tests can reach them. E2M1: e2m1.cuh.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#ifdef __CUDACC__
#define DIPTYCH_HD __host__ __device__ __forceinline__
#else
#define DIPTYCH_HD inline
#endif

namespace diptych::cuda {

DIPTYCH_HD uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
DIPTYCH_HD float float_of(uint32_t u) { return __builtin_bit_cast(float, u); }

template <bool kE5M2>
struct Fp8 {
  static constexpr int kMantissa = kE5M2 ? 2 : 3;
  static constexpr int kBias = kE5M2 ? 15 : 7;
  static constexpr uint32_t kMax = kE5M2 ? 0x7B : 0x7E;       // 57344, 448
  static constexpr uint32_t kFirstNaN = kE5M2 ? 0x7D : 0x7F;  // the smallest magnitude byte that is NaN
};

// float32 -> FP8 in integer arithmetic: RN, saturating, NaN -> 0x7F. For the host and for chips before sm_89.
template <bool kE5M2>
DIPTYCH_HD uint32_t encode_soft(float x) {
  using F = Fp8<kE5M2>;
  const uint32_t u = bits_of(x), sign = u >> 24 & 0x80;
  uint32_t a = u & 0x7fffffff;
  if (a > 0x7f800000) return 0x7F;
  if (a < static_cast<uint32_t>(128 - F::kBias) << 23) {
    // Below the smallest normal: an addend whose ulp is FP8's smallest step lets the float adder round.
    constexpr uint32_t kAddend = static_cast<uint32_t>(127 + 23 + 1 - F::kBias - F::kMantissa) << 23;
    return sign | (bits_of(float_of(a) + float_of(kAddend)) - kAddend);
  }
  constexpr int kShift = 23 - F::kMantissa;
  a += (1u << (kShift - 1)) - 1 + (a >> kShift & 1);
  a = (a >> kShift) - (static_cast<uint32_t>(127 - F::kBias) << F::kMantissa);
  return sign | (a < F::kMax ? a : F::kMax);
}

// Turns each NaN byte of the four into 0x7F.
template <bool kE5M2>
DIPTYCH_HD uint32_t canonical_nan4(uint32_t v) {
  const uint32_t nan = ((v & 0x7f7f7f7f) + (0x80 - Fp8<kE5M2>::kFirstNaN) * 0x01010101u) & 0x80808080;
  return (v | (nan - (nan >> 7))) & ~nan;
}

// Four float32 -> four FP8 bytes, the first in the lowest byte. kNaN false: there is no NaN among them. Saturating
// conversions are specified to give a positive NaN; E4M3 has only one, 0x7F.
template <bool kE5M2, bool kNaN = true>
DIPTYCH_HD uint32_t encode4(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  constexpr auto kind = kE5M2 ? __NV_E5M2 : __NV_E4M3;
  const uint32_t lo = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kind);
  const uint32_t hi = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, kind);
  return kNaN && kE5M2 ? canonical_nan4<kE5M2>(lo | hi << 16) : lo | hi << 16;
#else
  return encode_soft<kE5M2>(a) | encode_soft<kE5M2>(b) << 8 | encode_soft<kE5M2>(c) << 16 | encode_soft<kE5M2>(d) << 24;
#endif
}

template <bool kE5M2>
DIPTYCH_HD uint8_t encode(float x) {
  return static_cast<uint8_t>(encode4<kE5M2>(x, 0.0f, 0.0f, 0.0f));
}

// Two FP8 bytes -> float32, exact: both formats fit float16, and E5M2 is the upper byte of one.
template <bool kE5M2>
DIPTYCH_HD float2 decode2(uint32_t two) {
  __half2_raw h;
  if constexpr (kE5M2) {
    h.x = static_cast<unsigned short>(two << 8);
    h.y = static_cast<unsigned short>(two & 0xff00);
  } else {
    h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
  }
  return __half22float2(__half2(h));
}

// Whether one of four FP8 bytes, none of which is infinite, holds a number other than zero.
template <bool kE5M2>
DIPTYCH_HD bool any_number4(uint32_t v) {
  const uint32_t magnitude = v & 0x7f7f7f7f;
  const uint32_t nonzero = magnitude + 0x7f7f7f7f, nan = magnitude + (0x80 - Fp8<kE5M2>::kFirstNaN) * 0x01010101u;
  return (nonzero & ~nan & 0x80808080) != 0;
}

// Four FP8 bytes times a power of two, each product rounded once.
template <bool kE5M2>
DIPTYCH_HD uint32_t shifted4(uint32_t v, float by) {
  const float2 a = decode2<kE5M2>(v & 0xffff), b = decode2<kE5M2>(v >> 16);
  return encode4<kE5M2>(a.x * by, a.y * by, b.x * by, b.y * by);
}

// E8M0: 2^(code - 127); code 0 is a float32 subnormal, 255 is NaN.
DIPTYCH_HD float e8m0_to_float(uint32_t code) {
  return float_of(code == 0 ? 0x00400000u : code == 255 ? 0x7fc00000u : code << 23);
}

// The smallest E8M0 code whose value is at least v (v >= 0, not NaN); inf and values above 2^127 give 254.
DIPTYCH_HD uint32_t e8m0_round_up(float v) {
  const uint32_t u = bits_of(v), e = u >> 23 & 0xff, m = u & 0x7fffff;
  if (e == 255) return 254;
  const bool up = m > 0 && e != 254 && !(e == 0 && m <= 0x400000);
  return e + (up ? 1 : 0);
}

// 1 / 2^(code - 127) for codes 0..254; 2^-127 is a subnormal.
DIPTYCH_HD float e8m0_reciprocal(uint32_t code) { return float_of(code == 254 ? 0x00400000u : (254 - code) << 23); }

}  // namespace diptych::cuda
