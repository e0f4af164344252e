// Activations and their slopes in float32, one rounding for each operation, as the CPU kernels compute them: the same
// bits.
#pragma once

#include "cuda/codec.cuh"
#include "cuda/scale.cuh"
#include "diptych/fused.h"

namespace diptych::cuda {

// exp(v) for v <= 0, within 1 ulp; -inf gives 0, NaN gives NaN.
DIPTYCH_HD float exp_of_negative(float v) {
  constexpr float kLeast = -104.0f;  // its exponential is less than half the smallest subnormal
  constexpr float kLog2e = 0x1.715476p+0f, kLn2High = 0x1.63p-1f, kLn2Low = -0x1.bd0106p-13f;
  constexpr float kWhole = 0x1.8p+23f;  // added, it rounds to integers
  v = v < kLeast ? kLeast : v;
  const float shifted = v * kLog2e + kWhole, n = shifted - kWhole;
  const float r = (v - n * kLn2High) - n * kLn2Low;  // the first product and difference are exact
  // (exp(r) - 1 - r) / r^2 on |r| <= 0.3475
  const float p = (((0x1.6d44b6p-10f * r + 0x1.120cbep-7f) * r + 0x1.5554e8p-5f) * r + 0x1.5554dcp-3f) * r + 0.5f;
  const float e = 1.0f + (r + (r * r) * p);
  // Times 2^n in two steps, of which the first is exact and the second may round to a subnormal.
  const uint32_t power = (bits_of(shifted) - bits_of(kWhole) + (127 + 64)) << 23;
  return e * float_of(power) * 0x1p-64f;
}

struct Sigmoid {
  float s, rest;  // rest = 1 - s, as accurate as s
};

DIPTYCH_HD Sigmoid sigmoid(float z) {
  const float t = exp_of_negative(-fabsf(z));
  const float large = divide_rn(1.0f, 1.0f + t), small = t * large;
  return z >= 0.0f ? Sigmoid{large, small} : Sigmoid{small, large};
}

constexpr float kGeluLine = 0x1.988454p+0f, kGeluCube = 0x1.2444f2p-4f;  // 2 sqrt(2 / pi), and 0.044715 times that
constexpr float kQuick = 1.702f;

// What the sigmoid is taken of.
DIPTYCH_HD float sigmoid_argument(Activation kind, float x) {
  if (kind == Activation::gelu) return x * (x * x * kGeluCube + kGeluLine);
  return kind == Activation::silu ? x : x * kQuick;
}

DIPTYCH_HD float act(Activation kind, float x) {
  if (kind == Activation::relu || kind == Activation::srelu) {
    const float r = x < 0.0f ? 0.0f : x;
    return kind == Activation::relu ? r : r * r;
  }
  return x * sigmoid(sigmoid_argument(kind, x)).s;
}

DIPTYCH_HD float act_slope(Activation kind, float x) {
  if (kind == Activation::relu) return x > 0.0f ? 1.0f : x <= 0.0f ? 0.0f : x;
  if (kind == Activation::srelu) return 2.0f * (x < 0.0f ? 0.0f : x);
  const Sigmoid g = sigmoid(sigmoid_argument(kind, x));
  float steep = x * (g.s * g.rest);
  if (kind == Activation::gelu) {
    constexpr float kFlat = 256.0f;  // of x^2: from there on, s or 1 - s is 0; bounded, that times it is 0 too
    const float square = x * x, near = square > kFlat ? kFlat : square;
    steep = steep * (near * (3.0f * kGeluCube) + kGeluLine);
  } else if (kind == Activation::qgelu) {
    steep = steep * kQuick;
  }
  return g.s + steep;
}

}  // namespace diptych::cuda
