// The inner loops of norms and activations for one instruction set. No fused multiply-add: every operation rounds, so
// that all sets agree.
// Included only by avx2.cpp, avx512.cpp and generic.cpp, inside their target region.
#pragma once

#include "cpu/isa/simd.h"
#include "cpu/isa/source_kernels.h"

namespace diptych::cpu {
inline namespace DIPTYCH_ISA {

// Element i of a sum is added to partial sum i % kSums; the partial sums are added pairwise.
constexpr int kSums = 32;

DIPTYCH_INLINE VF first_lanes(VF v, AllLanes) { return v; }
DIPTYCH_INLINE VF first_lanes(VF v, int64_t lanes) {
  VF out{};
  __builtin_memcpy(&out, &v, lanes * sizeof(float));
  return out;
}

// Returns the sum of term(i, lanes) over [0, n).
template <class Term>
DIPTYCH_INLINE float sum_of(int64_t n, Term term) {
  constexpr int kVectors = kSums / kLanes;
  VF s[kVectors] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) s[v] = s[v] + term(i + v * kLanes, AllLanes{});
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = i + v * kLanes, left = n - at;
    if (left >= kLanes) {
      s[v] = s[v] + term(at, AllLanes{});
    } else if (left > 0) {
      s[v] = s[v] + first_lanes(term(at, left), left);
    }
  }
  float part[kSums];
  __builtin_memcpy(part, s, sizeof(s));
  for (int h = kSums / 2; h > 0; h /= 2)
    for (int j = 0; j < h; ++j) part[j] = part[j] + part[j + h];
  return part[0];
}

DIPTYCH_INLINE VF at(const float* x, int64_t i, auto lanes) { return load<DType::f32>(x, i, lanes); }

inline float sum(const float* x, int64_t n) {
  return sum_of(n, [x](int64_t i, auto lanes) DIPTYCH_LAMBDA { return at(x, i, lanes); });
}

inline float squares(const float* x, float mu, int64_t n) {
  return sum_of(n, [x, mu](int64_t i, auto lanes) DIPTYCH_LAMBDA {
    const VF d = at(x, i, lanes) - mu;
    return d * d;
  });
}

inline void add_one(float* g, int64_t n) {
  sweep(n, [&](int64_t i, auto lanes) DIPTYCH_LAMBDA { put(g + i, 1.0f + at(g, i, lanes), lanes); });
}

inline void normalize(const NormRow& row, const float* x, int64_t n, float* y) {
  const NormRow p = row;
  sweep(n, [&](int64_t i, auto lanes) DIPTYCH_LAMBDA {
    VF v = (at(x, i, lanes) - p.mu) * p.rsigma * at(p.g, i, lanes);
    if (p.beta) v = v + at(p.beta, i, lanes);
    put(y + i, v, lanes);
  });
}

inline void norm_grad(const NormRow& row, bool centered, const float* dy, const float* x, int64_t n, float* dx,
                      float* dgamma, float* dbeta) {
  const NormRow p = row;
  const float count = static_cast<float>(n);
  const auto h = [&](int64_t i, auto lanes) DIPTYCH_LAMBDA { return at(p.g, i, lanes) * at(dy, i, lanes); };
  const auto xhat = [&](int64_t i, auto lanes) DIPTYCH_LAMBDA { return (at(x, i, lanes) - p.mu) * p.rsigma; };
  const float mean = centered ? sum_of(n, h) / count : 0.0f;
  const float slope =
      sum_of(n, [&](int64_t i, auto lanes) DIPTYCH_LAMBDA { return h(i, lanes) * xhat(i, lanes); }) / count;
  sweep(n, [&](int64_t i, auto lanes) DIPTYCH_LAMBDA {
    const VF d = at(dy, i, lanes), to = xhat(i, lanes);
    put(dgamma + i, at(dgamma, i, lanes) + d * to, lanes);
    if (dbeta) put(dbeta + i, at(dbeta, i, lanes) + d, lanes);
    put(dx + i, ((h(i, lanes) - mean) - to * slope) * p.rsigma, lanes);
  });
}

// exp(v) for v <= 0, within 1 ulp; -inf gives 0, NaN gives NaN
DIPTYCH_INLINE VF exp_of_negative(VF v) {
  constexpr float kLeast = -104.0f;  // its exponential is less than half the smallest subnormal
  constexpr float kLog2e = 0x1.715476p+0f, kLn2High = 0x1.63p-1f, kLn2Low = -0x1.bd0106p-13f;
  constexpr float kWhole = 0x1.8p+23f;  // adding it rounds to integers
  v = v < kLeast ? splat(kLeast) : v;
  const VF shifted = v * kLog2e + kWhole, n = shifted - kWhole;
  const VF r = (v - n * kLn2High) - n * kLn2Low;  // the first product and difference are exact
  // (exp(r) - 1 - r) / r^2 on |r| <= 0.3475
  const VF p = (((0x1.6d44b6p-10f * r + 0x1.120cbep-7f) * r + 0x1.5554e8p-5f) * r + 0x1.5554dcp-3f) * r + 0.5f;
  const VF e = 1.0f + (r + (r * r) * p);
  // Multiplies by 2^n in two steps: the first is exact, and the second may round to a subnormal.
  const VI power = (bits_as<VI>(shifted) - bits_as<int32_t>(kWhole) + (127 + 64)) << 23;
  return e * bits_as<VF>(power) * 0x1p-64f;
}

struct Sigmoid {
  VF s, rest;  // rest = 1 - s, as accurate as s
};

DIPTYCH_INLINE Sigmoid sigmoid(VF z) {
  const VF t = exp_of_negative(-abs(z));
  const VF large = 1.0f / (1.0f + t), small = t * large;
  const VI up = z >= 0.0f;
  return {up ? large : small, up ? small : large};
}

// The value and slope (derivative) of each activation; NaN gives NaN.
struct Gelu {
  static constexpr float kLine = 0x1.988454p+0f, kCube = 0x1.2444f2p-4f;  // 2 sqrt(2 / pi), and 0.044715 times that
  DIPTYCH_INLINE static VF value(VF x) { return x * sigmoid(x * (x * x * kCube + kLine)).s; }
  DIPTYCH_INLINE static VF slope(VF x) {
    constexpr float kFlat = 256.0f;  // bound of x^2: beyond it s or 1 - s is 0, and so is its product with the bound
    const VF square = x * x;
    const Sigmoid g = sigmoid(x * (square * kCube + kLine));
    const VF near = square > kFlat ? splat(kFlat) : square;
    return g.s + x * (g.s * g.rest) * (near * (3.0f * kCube) + kLine);
  }
};

struct Relu {
  DIPTYCH_INLINE static VF value(VF x) { return x < 0.0f ? VF{} : x; }
  DIPTYCH_INLINE static VF slope(VF x) {
    const VF up = x > 0.0f ? splat(1.0f) : x;
    return x <= 0.0f ? VF{} : up;
  }
};

struct Silu {
  DIPTYCH_INLINE static VF value(VF x) { return x * sigmoid(x).s; }
  DIPTYCH_INLINE static VF slope(VF x) {
    const Sigmoid g = sigmoid(x);
    return g.s + x * (g.s * g.rest);
  }
};

struct SquaredRelu {
  DIPTYCH_INLINE static VF value(VF x) { return Relu::value(x) * Relu::value(x); }
  DIPTYCH_INLINE static VF slope(VF x) { return 2.0f * Relu::value(x); }
};

struct QuickGelu {
  static constexpr float kSteep = 1.702f;
  DIPTYCH_INLINE static VF value(VF x) { return x * sigmoid(x * kSteep).s; }
  DIPTYCH_INLINE static VF slope(VF x) {
    const Sigmoid g = sigmoid(x * kSteep);
    return g.s + x * (g.s * g.rest) * kSteep;
  }
};

template <class Fn>
DIPTYCH_INLINE void with_activation(Activation kind, Fn f) {
  if (kind == Activation::gelu) {
    f(Gelu{});
  } else if (kind == Activation::relu) {
    f(Relu{});
  } else if (kind == Activation::silu) {
    f(Silu{});
  } else if (kind == Activation::srelu) {
    f(SquaredRelu{});
  } else {
    f(QuickGelu{});
  }
}

inline void activation(Activation kind, const float* a, const float* b, int64_t n, float* y) {
  with_activation(kind, [&](auto act) DIPTYCH_LAMBDA {
    sweep(n, [&](int64_t i, auto lanes) DIPTYCH_LAMBDA {
      VF v = act.value(at(a, i, lanes));
      if (b) v = v * at(b, i, lanes);
      put(y + i, v, lanes);
    });
  });
}

inline void activation_grad(Activation kind, const float* dy, const float* a, const float* b, int64_t n, float* da,
                            float* db) {
  with_activation(kind, [&](auto act) DIPTYCH_LAMBDA {
    sweep(n, [&](int64_t i, auto lanes) DIPTYCH_LAMBDA {
      const VF d = at(dy, i, lanes), x = at(a, i, lanes);
      VF v = d;
      if (b) v = v * at(b, i, lanes);
      if (da) put(da + i, v * act.slope(x), lanes);
      if (db) put(db + i, d * act.value(x), lanes);
    });
  });
}

inline constexpr FusedKernels fused_kernels() {
  return {.sum = sum,
          .squares = squares,
          .add_one = add_one,
          .normalize = normalize,
          .norm_grad = norm_grad,
          .activation = activation,
          .activation_grad = activation_grad};
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych::cpu
