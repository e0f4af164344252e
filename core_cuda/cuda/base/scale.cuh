// Scales from amaxes (NUMERICS 2, 4, 5). Every operation rounds once; subnormals are kept.
#pragma once

#include <cfloat>
#include <cmath>

#include "cuda/base/codec.cuh"
#include "diptych/format.h"

namespace diptych::cuda {

DIPTYCH_HD float divide_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

DIPTYCH_HD float multiply_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// Returns a * b + c where a * b is exact, so that there is one rounding with an fma and without.
DIPTYCH_HD float add_exact_product(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return a * b + c;
#endif
}

DIPTYCH_HD float reciprocal_rn(float x) {
#ifdef __CUDA_ARCH__
  return __frcp_rn(x);
#else
  return 1.0f / x;
#endif
}

// Returns x, or NaN if x is infinite, as quantization requires (NUMERICS 1). A zero keeps its sign.
DIPTYCH_HD float without_inf(float x) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(x, 0.0f, x);
#else
  return x + x * 0.0f;
#endif
}

// Returns the larger of m and |x|, or m if x is NaN.
DIPTYCH_HD float max_abs(float m, float x) { return fmaxf(m, fabsf(x)); }

struct DivideRule {
  float max = 0.0f;            // the element's largest value
  float eps = 0.0f;            // lower bound of amax
  float value_for_inf = 0.0f;  // the scale if the quotient overflows
  bool pow2 = false;           // floor the scale to a power of two
};

DIPTYCH_HD float scale_from_amax(const DivideRule& rule, float amax) {
  if (amax < rule.eps) amax = rule.eps;
  if (amax == 0.0f || (bits_of(amax) & 0x7f800000) == 0x7f800000) return 1.0f;  // inf and NaN too
  float scale = divide_rn(rule.max, amax);
  if (bits_of(scale) == 0x7f800000) scale = rule.value_for_inf;
  return rule.pow2 ? float_of(bits_of(scale) & 0xff800000) : scale;
}

// Delayed scaling: returns the scale after an update with `amax`; `top` is max / 2^margin.
DIPTYCH_HD float next_scale(float amax, float top, float old) {
  if (!(amax > 0.0f && bits_of(amax) < 0x7f800000)) return old;  // NaN and inf too
  return fminf(divide_rn(top, amax), FLT_MAX);
}

// MXFP8: returns the scale code of a block; `max_reciprocal` is float32(1 / the element's largest value).
DIPTYCH_HD uint32_t e8m0_from_amax(float amax, float max_reciprocal) {
  return e8m0_round_up(multiply_rn(amax, max_reciprocal));
}

// NVFP4: the factors that the amax of a tensor or of a row gives its blocks; S is 2688 / amax.
struct TwoLevel {
  float to_code;  // S / 6: a block's amax times this is its E4M3 scale
  float inverse;  // 1 / S
};

DIPTYCH_HD TwoLevel two_level(float amax) {
  float s = fminf(divide_rn(448.0f * 6.0f, amax), FLT_MAX);
  if (amax == 0.0f || s == 0.0f) s = 1.0f;  // an infinite amax gives 0
  return {multiply_rn(s, 1.0f / 6.0f), reciprocal_rn(s)};
}

// Returns the E4M3 scale of a block; 0x7F, NaN without a sign, if its amax is NaN. The cast saturates, so an infinite
// product needs no bound.
DIPTYCH_HD uint32_t block_code(const TwoLevel& level, float amax) {
  const float v = multiply_rn(amax, level.to_code);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3) & 0x7f;
#else
  return encode_soft<false>(v) & 0x7f;
#endif
}

// Returns the multiplier of the block's elements.
DIPTYCH_HD float block_factor(const TwoLevel& level, uint32_t code) {
  return fminf(reciprocal_rn(multiply_rn(decode2<false>(code).x, level.inverse)), FLT_MAX);
}

constexpr float kPerAmax = 1.0f / 2688.0f;  // factor of the amax of one NVFP4 operand: 1 / (6 * 448)
constexpr float kPerAmaxPair = 1.0f / (36.0f * 448.0f * 448.0f);  // factor of the amaxes of two

}  // namespace diptych::cuda
