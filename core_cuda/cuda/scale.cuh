// From an amax to a scale (NUMERICS 2, 4). Every operation rounds once; subnormals are kept.
#pragma once

#include <cmath>

#include "cuda/codec.cuh"
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

// The larger of m and |x|; a NaN x leaves m.
DIPTYCH_HD float max_abs(float m, float x) { return fmaxf(m, fabsf(x)); }

struct DivideRule {
  float max = 0.0f;            // the element's largest value
  float eps = 0.0f;            // lower bound of amax
  float value_for_inf = 0.0f;  // what an overflowing quotient becomes
  bool pow2 = false;           // floor the scale to a power of two
};

DIPTYCH_HD float scale_from_amax(const DivideRule& rule, float amax) {
  if (amax < rule.eps) amax = rule.eps;
  if (amax == 0.0f || (bits_of(amax) & 0x7f800000) == 0x7f800000) return 1.0f;  // inf and NaN too
  float scale = divide_rn(rule.max, amax);
  if (bits_of(scale) == 0x7f800000) scale = rule.value_for_inf;
  return rule.pow2 ? float_of(bits_of(scale) & 0xff800000) : scale;
}

DIPTYCH_HD float scale_inverse(float scale) { return divide_rn(1.0f, scale); }

// MXFP8: the code of a block, `max_reciprocal` being float32(1 / the element's largest value).
DIPTYCH_HD uint32_t e8m0_from_amax(float amax, float max_reciprocal) {
  return e8m0_round_up(multiply_rn(amax, max_reciprocal));
}

}  // namespace diptych::cuda
