// Activations and their slopes in float32, one rounding for each operation, with the same bits as the CPU kernels. Each
// function takes several values, so that it branches on the kind once for all of them.
#pragma once

#include "cuda/base/codec.cuh"
#include "cuda/base/scale.cuh"
#include "diptych/source.h"

namespace diptych::cuda {

// Returns 1 / x for 1 <= x <= 2: the steps of __frcp_rn without its test for extremes.
DIPTYCH_HD float reciprocal_near_one(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return __fmaf_rn(y, __fmaf_rn(-x, y, 1.0f), y);
#else
  return 1.0f / x;
#endif
}

// exp(v) for v <= 0, within 1 ulp; -inf gives 0. For NaN the result is arbitrary.
DIPTYCH_HD float exp_of_negative(float v) {
  constexpr float kLeast = -104.0f;  // its exponential is less than half the smallest subnormal
  constexpr float kLog2e = 0x1.715476p+0f, kLn2High = 0x1.63p-1f, kLn2Low = -0x1.bd0106p-13f;
  constexpr float kWhole = 0x1.8p+23f + 64.0f;  // adding it rounds to integers
  v = fmaxf(v, kLeast);
  const float shifted = v * kLog2e + kWhole, n = shifted - kWhole;
  const float r = add_exact_product(n, -kLn2High, v) - n * kLn2Low;  // the sum in parentheses is exact too
  // (exp(r) - 1 - r) / r^2 on |r| <= 0.3475
  const float p = (((0x1.6d44b6p-10f * r + 0x1.120cbep-7f) * r + 0x1.5554e8p-5f) * r + 0x1.5554dcp-3f) * r + 0.5f;
  const float e = 1.0f + (r + (r * r) * p);
  // Multiplies by 2^n in two steps: n + 64, the lowest bits of `shifted`, is added to the exponent; the product with
  // 2^-64 may round to a subnormal.
  return float_of((bits_of(shifted) << 23) + bits_of(e)) * 0x1p-64f;
}

struct Sigmoid {
  float s, product;  // product = s * (1 - s), as accurate as s
};

// For NaN the result is arbitrary; callers multiply it by the NaN.
DIPTYCH_HD Sigmoid sigmoid(float z) {
  const float t = exp_of_negative(-fabsf(z));
  const float large = reciprocal_near_one(1.0f + t), small = t * large;
  return {z >= 0.0f ? large : small, large * small};
}

constexpr float kGeluLine = 0x1.988454p+0f, kGeluCube = 0x1.2444f2p-4f;  // 2 sqrt(2 / pi), and 0.044715 times that
constexpr float kQuick = 1.702f;

DIPTYCH_HD bool has_sigmoid(Activation kind) { return kind != Activation::relu && kind != Activation::srelu; }
DIPTYCH_HD float positive_part(float x) { return x < 0.0f ? 0.0f : x; }

// Computes the sigmoids that `acts` and `slopes` take; does nothing if the kind has no sigmoid.
template <int kN>
DIPTYCH_HD void sigmoids(Activation kind, const float (&x)[kN], Sigmoid (&g)[kN]) {
  if (!has_sigmoid(kind)) return;
  float z[kN];
#pragma unroll
  for (int j = 0; j < kN; ++j) z[j] = x[j];
  if (kind == Activation::gelu) {
#pragma unroll
    for (int j = 0; j < kN; ++j) z[j] = x[j] * (x[j] * x[j] * kGeluCube + kGeluLine);
  } else if (kind == Activation::qgelu) {
#pragma unroll
    for (int j = 0; j < kN; ++j) z[j] = x[j] * kQuick;
  }
#pragma unroll
  for (int j = 0; j < kN; ++j) g[j] = sigmoid(z[j]);
}

// y = act(x)
template <int kN>
DIPTYCH_HD void acts(Activation kind, const float (&x)[kN], const Sigmoid (&g)[kN], float (&y)[kN]) {
  if (has_sigmoid(kind)) {
#pragma unroll
    for (int j = 0; j < kN; ++j) y[j] = x[j] * g[j].s;
    return;
  }
#pragma unroll
  for (int j = 0; j < kN; ++j) y[j] = positive_part(x[j]);
  if (kind == Activation::relu) return;
#pragma unroll
  for (int j = 0; j < kN; ++j) y[j] *= y[j];
}

// y = act'(x)
template <int kN>
DIPTYCH_HD void slopes(Activation kind, const float (&x)[kN], const Sigmoid (&g)[kN], float (&y)[kN]) {
  if (kind == Activation::relu) {
#pragma unroll
    for (int j = 0; j < kN; ++j) y[j] = x[j] > 0.0f ? 1.0f : x[j] <= 0.0f ? 0.0f : x[j];
    return;
  }
  if (kind == Activation::srelu) {
#pragma unroll
    for (int j = 0; j < kN; ++j) y[j] = 2.0f * positive_part(x[j]);
    return;
  }
#pragma unroll
  for (int j = 0; j < kN; ++j) y[j] = x[j] * g[j].product;
  if (kind == Activation::gelu) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      constexpr float kFlat = 256.0f;  // bound of x^2: beyond it s or 1 - s is 0, and so is its product with the bound
      const float square = x[j] * x[j], near = square > kFlat ? kFlat : square;
      y[j] = y[j] * (near * (3.0f * kGeluCube) + kGeluLine);
    }
  } else if (kind == Activation::qgelu) {
#pragma unroll
    for (int j = 0; j < kN; ++j) y[j] = y[j] * kQuick;
  }
#pragma unroll
  for (int j = 0; j < kN; ++j) y[j] = g[j].s + y[j];
}

// Bounds that need no exponential, for computing maxima: |act(x)| <= max(x, kLeastBound) and |act'(x)| <= kSteepest,
// for every float32 but NaN and every kind but srelu. Rounding is monotonic, so they hold after each rounded product
// too.
constexpr float kLeastBound = 0.2785f, kSteepest = 1.13f;
DIPTYCH_HD bool bounded(Activation kind) { return kind != Activation::srelu; }

}  // namespace diptych::cuda
