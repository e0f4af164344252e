// What an op encodes instead of its input (`Source`), eight neighbours at a time, in float32.
#pragma once

#include "cuda/device.h"
#include "cuda/fused/activation.cuh"
#include "cuda/fused/elements.cuh"
#include "diptych/ops.h"

namespace diptych::cuda {

struct SourceArgs {
  SourceKind kind = SourceKind::plain;
  Activation activation = Activation::gelu;
  bool gated = false, zero_centered_gamma = false;
  bool vec = false;         // every operand is aligned to 16 bytes and its rows hold whole groups of eight
  int64_t m = 0, k = 0;     // of what is encoded
  int64_t cols = 0, f = 0;  // of x; where b starts (gated)
  Elements x, gamma, beta, dy;
  const float *mu = nullptr, *rsigma = nullptr;  // [m]; mu null: rmsnorm
};

inline SourceArgs source_args(const TensorView& x, const Source& s) {
  SourceArgs p;
  const Extent e = encoded_extent(x, s);
  p.kind = s.kind, p.activation = s.activation, p.gated = s.gated, p.zero_centered_gamma = s.zero_centered_gamma;
  p.m = e.rows, p.k = e.cols, p.cols = x.cols(), p.f = s.gated ? x.cols() / 2 : x.cols();
  p.x = Elements(x), p.gamma = Elements(s.gamma), p.beta = Elements(s.beta), p.dy = Elements(s.dy);
  if (s.mu.given()) p.mu = s.mu.as<const float>();
  if (s.rsigma.given()) p.rsigma = s.rsigma.as<const float>();
  p.vec = p.k % 8 == 0 && p.f % 8 == 0;
  for (const Elements* t : {&p.x, &p.gamma, &p.beta, &p.dy}) p.vec = p.vec && aligned(t->data, 16);
  return p;
}

__device__ __forceinline__ float normalized(float x, float mu, float rsigma, float gamma, bool zero_centered) {
  return (x - mu) * rsigma * (zero_centered ? 1.0f + gamma : gamma);
}

// Columns col .. col + count - 1 (count <= 8) of a row, all in one half where the gradient of a gate is encoded.
__device__ __forceinline__ Floats8 source_part(const SourceArgs& p, int64_t row, int64_t col, int count) {
  const int64_t at = row * p.cols + col;
  if (p.kind == SourceKind::activation_grad) {
    const bool second = col >= p.f;
    const int64_t c = second ? col - p.f : col;
    const Floats8 a = load8(p.x, row * p.cols + c, count, p.vec);
    Floats8 d = load8(p.dy, row * p.f + c, count, p.vec);
    if (p.gated && !second) {
      const Floats8 b = load8(p.x, at + p.f, count, p.vec);
#pragma unroll
      for (int j = 0; j < 8; ++j) d.v[j] *= b.v[j];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) d.v[j] *= second ? act(p.activation, a.v[j]) : act_slope(p.activation, a.v[j]);
    return d;
  }
  Floats8 y = load8(p.x, at, count, p.vec);
  if (p.kind == SourceKind::norm) {
    const float mu = p.mu ? __ldg(p.mu + row) : 0.0f, rsigma = __ldg(p.rsigma + row);
    const Floats8 g = load8(p.gamma, col, count, p.vec);
#pragma unroll
    for (int j = 0; j < 8; ++j) y.v[j] = normalized(y.v[j], mu, rsigma, g.v[j], p.zero_centered_gamma);
    if (p.beta.data) {
      const Floats8 b = load8(p.beta, col, count, p.vec);
#pragma unroll
      for (int j = 0; j < 8; ++j) y.v[j] += b.v[j];
    }
  } else if (p.kind == SourceKind::activation) {
#pragma unroll
    for (int j = 0; j < 8; ++j) y.v[j] = act(p.activation, y.v[j]);
    if (p.gated) {
      const Floats8 b = load8(p.x, at + p.f, count, p.vec);
#pragma unroll
      for (int j = 0; j < 8; ++j) y.v[j] *= b.v[j];
    }
  }
  return y;
}

// Row `row`, columns col .. col + 7 of what is encoded; what lies outside is 0. A call, not inlined: the kernels ask
// for many rows, and the code is long.
static __device__ __noinline__ Floats8 source8(const SourceArgs& p, int64_t row, int64_t col) {
  Floats8 y{};
  if (row >= p.m || col >= p.k) return y;
  const int64_t left = p.k - col;
  const int count = left < 8 ? static_cast<int>(left) : 8;
  if (p.kind != SourceKind::activation_grad || !p.gated || col >= p.f || col + count <= p.f) {
    y = source_part(p, row, col, count);
#pragma unroll
    for (int j = 0; j < 8; ++j) y.v[j] = j < count ? y.v[j] : 0.0f;
    return y;
  }
  // Eight columns across the halves: no vector path, one at a time.
  for (int j = 0; j < count; ++j) {
    const float v = source_part(p, row, col + j, 1).v[0];
#pragma unroll
    for (int i = 0; i < 8; ++i) y.v[i] = i == j ? v : y.v[i];
  }
  return y;
}

// Stands for an element type: float32 values of a source, computed on the way in.
struct Computed {};
template <typename T>
using Held = std::conditional_t<std::is_same_v<T, Computed>, float, T>;

// with_float_type, or f(Computed{}).
template <typename F>
Status with_input_type(const TensorView& x, const Source& source, const char* op, F&& f) {
  return source.kind == SourceKind::plain ? with_float_type(x.dtype, op, f) : f(Computed{});
}

// To bfloat16 and back
__device__ __forceinline__ float through_bf16(float x) { return to_float(from_float<__nv_bfloat16>(x)); }

// load_row8 of what is encoded.
template <typename T>
__device__ __forceinline__ Row8<Held<T>> fetch_row8(const SourceArgs& p, int64_t row, int64_t col) {
  if constexpr (std::is_same_v<T, Computed>) {
    const Floats8 f = source8(p, row, col);
    Row8<float> r;
#pragma unroll
    for (int j = 0; j < 8; ++j) r.v[j / 4].w[j % 4] = bits_of(f.v[j]);
    return r;
  } else {
    return load_row8(static_cast<const T*>(p.x.data), p.m, p.k, row, col, p.vec);
  }
}

}  // namespace diptych::cuda
