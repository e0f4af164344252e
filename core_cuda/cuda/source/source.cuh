// The values that an op encodes instead of its input (`Source`), eight neighbours at a time, in float32. Permuted rows
// are read here if no kernel of their own takes them.
//
// Kernels read through a `Reader`, which separates loads from arithmetic. `Typed` sources, the usual ones, are inlined
// with the loads of several rows in flight; `Computed` stands for all others, with a function call for each row.
#pragma once

#include "cuda/activation/activation.cuh"
#include "cuda/base/device.h"
#include "cuda/permute/origin.cuh"
#include "cuda/source/elements.cuh"
#include "diptych/quantize.h"

namespace diptych::cuda {

struct SourceArgs {
  SourceKind kind = SourceKind::plain;
  Activation activation = Activation::gelu;
  bool gated = false, zero_centered_gamma = false;
  bool vec = false;         // every operand is aligned to 16 bytes and its rows hold whole groups of eight
  int64_t m = 0, k = 0;     // extents of the encoded tensor
  int64_t cols = 0, f = 0;  // columns of x; the column where b, the gate, starts
  Elements x, gamma, beta, dy;
  const float *mu = nullptr, *rsigma = nullptr;  // [m]; mu null: rmsnorm
  Origins from;                                  // permuted
};

inline SourceArgs source_args(const TensorView& x, const Source& s) {
  SourceArgs p;
  const Extent e = encoded_extent(x, s);
  p.kind = s.kind, p.activation = s.activation, p.gated = s.gated, p.zero_centered_gamma = s.zero_centered_gamma;
  p.m = e.rows, p.k = e.cols, p.cols = x.cols(), p.f = s.gated ? x.cols() / 2 : x.cols();
  p.x = Elements(x), p.gamma = Elements(s.gamma), p.beta = Elements(s.beta), p.dy = Elements(s.dy);
  if (s.mu.given()) p.mu = s.mu.as<const float>();
  if (s.rsigma.given()) p.rsigma = s.rsigma.as<const float>();
  if (s.kind == SourceKind::permuted) p.from = Origins(s.row_source, s.row_id_map.cols(), x.rows());
  p.vec = p.k % 8 == 0 && p.f % 8 == 0;
  for (const Elements* t : {&p.x, &p.gamma, &p.beta, &p.dy}) p.vec = p.vec && aligned(t->data, 16);
  return p;
}

__device__ __forceinline__ float gain(float gamma, bool zero_centered) { return zero_centered ? 1.0f + gamma : gamma; }
__device__ __forceinline__ float normalized(float x, float mu, float rsigma, float gain) {
  return (x - mu) * rsigma * gain;
}

// Returns columns col .. col + count - 1 (count <= 8) of a row. For the gradient of a gate they must all lie in one
// half. The source must not be plain.
__device__ __forceinline__ Floats8 source_part(const SourceArgs& p, int64_t row, int64_t col, int count) {
  const int64_t at = row * p.cols + col;
  if (p.kind == SourceKind::permuted) {
    const uint32_t token = p.from.at(row);
    return load8(p.x, token * p.cols + col, token < p.from.none ? count : 0, p.vec && token < p.from.none);
  }
  if (p.kind == SourceKind::norm) {
    Floats8 y = load8(p.x, at, count, p.vec);
    const float mu = p.mu ? __ldg(p.mu + row) : 0.0f, rsigma = __ldg(p.rsigma + row);
    const Floats8 g = load8(p.gamma, col, count, p.vec);
#pragma unroll
    for (int j = 0; j < 8; ++j) y.v[j] = normalized(y.v[j], mu, rsigma, gain(g.v[j], p.zero_centered_gamma));
    if (p.beta.data) {
      const Floats8 b = load8(p.beta, col, count, p.vec);
#pragma unroll
      for (int j = 0; j < 8; ++j) y.v[j] += b.v[j];
    }
    return y;
  }
  const bool grad = p.kind == SourceKind::activation_grad, second = grad && col >= p.f;
  const int64_t c = second ? col - p.f : col;
  const Floats8 a = load8(p.x, row * p.cols + c, count, p.vec);
  Floats8 factor, y;  // factor: multiplies the activation or its slope
#pragma unroll
  for (int j = 0; j < 8; ++j) factor.v[j] = 1.0f;
  if (grad) factor = load8(p.dy, row * p.f + c, count, p.vec);
  if (p.gated && !second) {
    const Floats8 b = load8(p.x, at + p.f, count, p.vec);
#pragma unroll
    for (int j = 0; j < 8; ++j) factor.v[j] *= b.v[j];
  }
  Sigmoid g[8];
  sigmoids(p.activation, a.v, g);
  if (grad && !second) {
    slopes(p.activation, a.v, g, y.v);
  } else {
    acts(p.activation, a.v, g, y.v);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) y.v[j] *= factor.v[j];
  return y;
}

// Returns columns col .. col + 7 of row `row` of the encoded tensor, 0 outside. It is not inlined, because the code is
// long.
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
  // Eight columns that span both halves are computed one at a time.
  for (int j = 0; j < count; ++j) {
    const float v = source_part(p, row, col + j, 1).v[0];
#pragma unroll
    for (int i = 0; i < 8; ++i) y.v[i] = i == j ? v : y.v[i];
  }
  return y;
}

// Computed, Gathered and Typed take the place of an element type. Computed: float32 values of a source, computed while
// they are read.
struct Computed {};
struct Gathered {};  // permuted rows of bfloat16, not computed; SourceArgs::vec holds
template <SourceKind kSource, typename T>
struct Typed {  // x and dy are T, and SourceArgs::vec holds
  static constexpr SourceKind kKind = kSource;
  using Element = T;
};

template <typename T>
inline constexpr bool kTyped = false;
template <SourceKind kSource, typename T>
inline constexpr bool kTyped<Typed<kSource, T>> = true;
template <typename T>
inline constexpr bool kTypedNorm = false;
template <typename T>
inline constexpr bool kTypedNorm<Typed<SourceKind::norm, T>> = true;
template <typename T>
inline constexpr bool kTypedGrad = false;
template <typename T>
inline constexpr bool kTypedGrad<Typed<SourceKind::activation_grad, T>> = true;
template <typename T>
inline constexpr bool kComputed = kTyped<T> || std::is_same_v<T, Computed>;
template <typename T>
using Held = std::conditional_t<kComputed<T>, float, std::conditional_t<std::is_same_v<T, Gathered>, __nv_bfloat16, T>>;

// Returns whether the source is a norm or SwiGLU. Kernels have a branch for these, so that the compiler knows it there.
template <typename In>
__device__ __forceinline__ bool usual(const SourceArgs& p) {
  return kTypedNorm<In> || (kTyped<In> && p.gated && p.activation == Activation::silu);
}

// Calls f(Typed<kind, T>{}) if x and dy are T and all rows are whole vectors, else f(Computed{}).
template <typename T, typename F>
Status with_source(const SourceArgs& p, F&& f) {
  constexpr DType kType = std::is_same_v<T, float> ? DType::f32 : std::is_same_v<T, __half> ? DType::f16 : DType::bf16;
  if (p.vec && p.x.type == kType) {
    if (p.kind == SourceKind::norm) return f(Typed<SourceKind::norm, T>{});
    if (p.kind == SourceKind::activation) return f(Typed<SourceKind::activation, T>{});
    if (p.kind == SourceKind::activation_grad && p.dy.type == kType) {
      return f(Typed<SourceKind::activation_grad, T>{});
    }
  }
  return f(Computed{});
}

// Calls with_float_type for plain x, else with_source for bfloat16, the usual type.
template <typename F>
Status with_input_type(const SourceArgs& p, const char* op, F&& f) {
  return p.kind == SourceKind::plain ? with_float_type(p.x.type, op, f) : with_source<__nv_bfloat16>(p, f);
}

// Rounds to bfloat16 and converts back.
__device__ __forceinline__ float through_bf16(float x) { return to_float(from_float<__nv_bfloat16>(x)); }

__device__ __forceinline__ Row8<float> as_row(const Floats8& f) {
  Row8<float> r;
#pragma unroll
  for (int j = 0; j < 8; ++j) r.v[j / 4].w[j % 4] = bits_of(f.v[j]);
  return r;
}

// Reads columns col .. col + 7 of rows row0 + i * step: `load` loads the operands of row i, `row` and `values` compute
// it. Rows and columns outside are 0. kPair: `both` computes both halves of a gate's gradient at once, for columns of
// the first half. kUsual: the source is `usual`, and no row or column is outside.
template <typename In, bool kPair = false, bool kUsual = false>
class Reader {
 public:
  static constexpr int kAhead = 16;
  using Raw = Row8<In>;

  __device__ __forceinline__ Reader(const SourceArgs& p, int64_t row0, int64_t col, int step = 1)
      : p_(p), row0_(row0), col_(col), step_(step) {}
  __device__ __forceinline__ Raw load(int i) const {
    return load_row8(static_cast<const In*>(p_.x.data), p_.m, p_.k, row0_ + i * step_, col_, p_.vec);
  }
  __device__ __forceinline__ Row8<In> row(int, const Raw& r) const { return r; }
  __device__ __forceinline__ Floats8 values(int, const Raw& r) const { return as_floats(r); }

 private:
  const SourceArgs& p_;
  int64_t row0_, col_;
  int step_;
};

template <bool kPair>
class Reader<Computed, kPair, false> {
 public:
  static constexpr int kAhead = 1;
  static constexpr bool kBounds = false;
  struct Raw {};

  __device__ __forceinline__ Reader(const SourceArgs& p, int64_t row0, int64_t col, int step = 1)
      : p_(p), row0_(row0), col_(col), step_(step) {}
  __device__ __forceinline__ Raw load(int) const { return {}; }
  __device__ __forceinline__ Floats8 values(int i, const Raw&) const { return source8(p_, row0_ + i * step_, col_); }
  __device__ __forceinline__ Row8<float> row(int i, const Raw& r) const { return as_row(values(i, r)); }

 private:
  const SourceArgs& p_;
  int64_t row0_, col_;
  int step_;
};

template <SourceKind kKind, typename T, bool kPair, bool kUsual>
class Reader<Typed<kKind, T>, kPair, kUsual> {
  static constexpr bool kNorm = kKind == SourceKind::norm, kGrad = kKind == SourceKind::activation_grad;

 public:
  static constexpr int kAhead = (kNorm ? 4 : 2) / (sizeof(T) == 4 ? 2 : 1);
  static constexpr bool kBounds = !kNorm;  // whether there is `bound`
  struct Raw {
    Row8<T> a, b, d;   // x; the gate; dy
    float mu, rsigma;  // norm
  };

  __device__ __forceinline__ Reader(const SourceArgs& p, int64_t row0, int64_t col, int step = 1)
      : p_(p), row0_(row0), step_(step), second_(kGrad && !kPair && has_gate() && col >= p.f) {
    const int64_t left = col < (kGrad && kPair ? p.f : p.k) && row0 < p.m ? p.m - row0 : 0;
    left_ = left < 0x7fffffff ? static_cast<int>(left) : 0x7fffffff;
    constexpr int64_t kSize = sizeof(T);
    const int64_t c = second_ ? col - p.f : col;
    x_ = static_cast<const char*>(p.x.data) + (row0 * p.cols + c) * kSize, x_step_ = p.cols * step * kSize;
    if constexpr (kGrad)
      dy_ = static_cast<const char*>(p.dy.data) + (row0 * p.f + c) * kSize, dy_step_ = p.f * step * kSize;
    if (kNorm && !outside(0)) {
      gain_ = load8(p.gamma, col, 8, true);
#pragma unroll
      for (int j = 0; j < 8; ++j) gain_.v[j] = gain(gain_.v[j], p.zero_centered_gamma);
      if (p.beta.data) beta_ = load8(p.beta, col, 8, true);
    }
  }

  __device__ __forceinline__ Raw load(int i) const {
    Raw r{};
    if (outside(i)) return r;
    const char* x = x_ + i * x_step_;
    r.a = load_vectors<T>(x, 0);
    if constexpr (kNorm) {
      const int64_t row = row0_ + i * step_;
      r.mu = p_.mu ? __ldg(p_.mu + row) : 0.0f, r.rsigma = __ldg(p_.rsigma + row);
    } else if (has_gate() && !second_) {
      r.b = load_vectors<T>(x, p_.f);
    }
    if constexpr (kGrad) r.d = load_vectors<T>(dy_ + i * dy_step_, 0);
    return r;
  }

  // With operands of 0 an activation and its gradient are 0, but a norm needs a test.
  __device__ __forceinline__ Floats8 values(int i, const Raw& r) const {
    const Floats8 a = as_floats(r.a);
    Floats8 y{};
    if constexpr (kNorm) {
      if (outside(i)) return y;
#pragma unroll
      for (int j = 0; j < 8; ++j) y.v[j] = normalized(a.v[j], r.mu, r.rsigma, gain_.v[j]);
      if (p_.beta.data) {
#pragma unroll
        for (int j = 0; j < 8; ++j) y.v[j] += beta_.v[j];
      }
      return y;
    }
    Sigmoid g[8];
    sigmoids(activation(), a.v, g);
    if (kGrad && !second_) {
      slopes(activation(), a.v, g, y.v);
    } else {
      acts(activation(), a.v, g, y.v);
    }
    if constexpr (kGrad) {
      multiply(y, gated(r.d, r));
    } else {
      y = gated(y, r);
    }
    return y;
  }
  __device__ __forceinline__ Row8<float> row(int i, const Raw& r) const { return as_row(values(i, r)); }

  // Computes an activation's gradient in both halves; y[1] is undefined without a gate.
  __device__ __forceinline__ void both(const Raw& r, Floats8 (&y)[2]) const {
    static_assert(kGrad && kPair);
    const Floats8 a = as_floats(r.a);
    Sigmoid g[8];
    sigmoids(activation(), a.v, g);
    slopes(activation(), a.v, g, y[0].v);
    acts(activation(), a.v, g, y[1].v);
    multiply(y[0], gated(r.d, r)), multiply(y[1], as_floats(r.d));
  }

  // Returns an upper bound of the row's |values| that are not NaN; for an activation's gradient, of both halves.
  __device__ __forceinline__ float bound(const Raw& r) const {
    float m = 0.0f;
    if (!bounded(activation())) return INFINITY;
    const Floats8 a = as_floats(r.a), d = as_floats(r.d);
    if constexpr (kGrad) {
      const Floats8 whole = gated(r.d, r);
#pragma unroll
      for (int j = 0; j < 8; ++j) m = max_abs(m, whole.v[j]);
      m *= kSteepest;
      if (!has_gate()) return m;
    }
    Floats8 most;
#pragma unroll
    for (int j = 0; j < 8; ++j) most.v[j] = fmaxf(a.v[j], kLeastBound);
    if constexpr (kGrad) {
      multiply(most, d);
    } else {
      most = gated(most, r);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) m = max_abs(m, most.v[j]);
    return m;
  }

 private:
  __device__ __forceinline__ bool has_gate() const { return kUsual ? !kNorm : p_.gated; }
  __device__ __forceinline__ Activation activation() const { return kUsual ? Activation::silu : p_.activation; }
  __device__ __forceinline__ bool outside(int i) const { return !kUsual && i * step_ >= left_; }
  __device__ __forceinline__ static void multiply(Floats8& y, const Floats8& by) {
#pragma unroll
    for (int j = 0; j < 8; ++j) y.v[j] *= by.v[j];
  }
  // Returns y times the gate, or y without a gate.
  __device__ __forceinline__ Floats8 gated(Floats8 y, const Raw& r) const {
    if (has_gate() && !second_) multiply(y, as_floats(r.b));
    return y;
  }
  __device__ __forceinline__ Floats8 gated(const Row8<T>& y, const Raw& r) const { return gated(as_floats(y), r); }

  const SourceArgs& p_;
  int64_t row0_;
  int step_, left_;
  bool second_;
  const char *x_, *dy_ = nullptr;
  int64_t x_step_, dy_step_ = 0;  // bytes
  Floats8 gain_, beta_;
};

template <>
class Reader<Gathered, false, false> {
 public:
  static constexpr int kAhead = 16;
  using Raw = Row8<__nv_bfloat16>;

  __device__ __forceinline__ Reader(const SourceArgs& p, int64_t row0, int64_t col) : p_(p), row0_(row0), col_(col) {}
  __device__ __forceinline__ Raw load(int i) const {
    const uint32_t token = row0_ + i < p_.m && col_ < p_.k ? p_.from.at(row0_ + i) : p_.from.none;
    return token < p_.from.none ? load_vectors<__nv_bfloat16>(p_.x.data, token * p_.cols + col_) : Raw{};
  }
  __device__ __forceinline__ Raw row(int, const Raw& r) const { return r; }

 private:
  const SourceArgs& p_;
  int64_t row0_, col_;
};

// Calls body(i, operands of row i) for rows 0 .. kRows - 1, with the loads of the next kAhead rows in flight, and after
// every kUnroll rows between(the first of them). The loop is unrolled for kUnroll rows, or with kAll for all of them.
template <int kRows, int kUnroll, bool kAll = false, typename Source, typename Body, typename Between>
__device__ __forceinline__ void each_row(const Source& source, Body&& body, Between&& between) {
  constexpr int kAhead = Source::kAhead < kUnroll ? Source::kAhead : kUnroll;
  static_assert(kRows % kUnroll == 0 && kUnroll % kAhead == 0);
  typename Source::Raw raw[kAhead];
#pragma unroll
  for (int u = 0; u < kAhead; ++u) raw[u] = source.load(u);
#pragma unroll(kAll ? kRows / kUnroll : 1)
  for (int first = 0; first < kRows; first += kUnroll) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const auto now = raw[u % kAhead];
      if (first + u + kAhead < kRows) raw[u % kAhead] = source.load(first + u + kAhead);
      body(first + u, now);
    }
    between(first);
  }
}
template <int kRows, typename Source, typename Body>
__device__ __forceinline__ void each_row(const Source& source, Body&& body) {
  each_row<kRows, kRows>(source, body, [](int) {});
}

// Fetches kRows rows of eight columns of the encoded tensor.
template <typename In, int kRows>
__device__ __forceinline__ void fetch_rows(const SourceArgs& p, int64_t row, int64_t col, Row8<Held<In>> (&x)[kRows]) {
  const auto fetch = [&](const auto& source) {
    each_row<kRows>(source, [&](int i, const auto& raw) { x[i] = source.row(i, raw); });
  };
  if constexpr (kTyped<In>) {
    if (usual<In>(p) && row + kRows <= p.m && col + 8 <= p.k) return fetch(Reader<In, false, true>(p, row, col));
  }
  fetch(Reader<In>(p, row, col));
}

// Returns the place along k of tile `index` of `tiles` that are `width` columns wide. The two halves of a gate's
// gradient share operands, so their tiles alternate and the second finds them in a cache.
template <typename In>
__device__ __forceinline__ unsigned paired_tile(const SourceArgs& p, unsigned index, unsigned tiles, int width) {
  if constexpr (kTypedGrad<In>) {
    if (p.gated && p.f % width == 0) return index / 2 + index % 2 * (tiles / 2);
  }
  return index;
}

}  // namespace diptych::cuda
