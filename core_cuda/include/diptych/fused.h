// Norms and activations, alone and as what quantize encodes instead of its input. All arithmetic is float32, each
// operation rounded.
//
//   y = ((x - mu) * rsigma) * g + beta       g is gamma or 1 + gamma; rmsnorm: mu is 0, and there is no beta
//   y = act(a)            x [M, F] = a
//   y = act(a) * b        gated: x [M, 2F] = (a | b)
#pragma once

#include "diptych/status.h"
#include "diptych/tensor.h"

namespace diptych {

// Numbered as the frontends pass them.
enum class Norm : int32_t { layernorm, rmsnorm, count_ };

enum class Activation : int32_t {
  gelu,   // x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)): the tanh form
  relu,   // max(x, 0)
  silu,   // x * sigmoid(x)
  srelu,  // max(x, 0)^2
  qgelu,  // x * sigmoid(1.702 x)
  count_
};

// What an op encodes instead of x: float32 values computed from it, never rounded to a narrower type; or x's rows in
// the order of a map (moe.h), zeros where it has none.
enum class SourceKind : int32_t { plain, norm, activation, activation_grad, permuted, count_ };

struct Source {
  SourceKind kind = SourceKind::plain;
  Norm norm = Norm::layernorm;
  Activation activation = Activation::gelu;
  bool gated = false;
  bool zero_centered_gamma = false;
  TensorView gamma;   // norm: [K]
  TensorView beta;    // norm: [K], optional
  TensorView mu;      // norm: [M] float32, layernorm only
  TensorView rsigma;  // norm: [M] float32
  TensorView dy;      // activation_grad: [M, F]; what is encoded has x's shape
  // permuted: what is encoded is [rows, K]. Two maps that disagree leave open which rows are read, nothing more.
  TensorView row_id_map;  // [M, slots] int32: where x's rows go
  TensorView row_source;  // [rows] int32: where each row comes from
};

// Rows and columns of what is encoded.
struct Extent {
  int64_t rows, cols;
};
inline Extent encoded_extent(const TensorView& x, const Source& s) {
  return {s.kind == SourceKind::permuted ? s.row_source.numel() : x.rows(),
          s.kind == SourceKind::activation && s.gated ? x.cols() / 2 : x.cols()};
}

struct NormArgs {
  TensorView x;       // [..., K] float32 | bfloat16 | float16
  TensorView gamma;   // [K], with y only
  TensorView beta;    // [K], with y only; optional, layernorm only
  TensorView mu;      // [M] float32, layernorm only: written
  TensorView rsigma;  // [M] float32: written, 1 / sqrt(variance or mean square + eps)
  TensorView y;       // [..., K] float32 | bfloat16 | float16, optional: absent, the statistics are all
  Norm norm = Norm::layernorm;
  float eps = 0.0f;
  bool zero_centered_gamma = false;
};

// xhat = (x - mu) * rsigma, h = g * dy:
//   dx = rsigma * ((h - mean(h)) - xhat * mean(h * xhat))       rmsnorm: without mean(h)
//   dgamma = sum over rows of dy * xhat, dbeta = sum over rows of dy
struct NormGradArgs {
  TensorView dy;         // [..., K] float32 | bfloat16 | float16
  TensorView x;          // [..., K] float32 | bfloat16 | float16
  TensorView gamma;      // [K]
  TensorView mu;         // [M] float32, layernorm only
  TensorView rsigma;     // [M] float32
  TensorView dx;         // [..., K] of x's dtype
  TensorView dgamma;     // [K] of gamma's dtype
  TensorView dbeta;      // [K] of gamma's dtype; optional, layernorm only
  TensorView workspace;  // uint8, at least norm_grad_workspace_bytes, 16-byte aligned; CUDA only
  Norm norm = Norm::layernorm;
  bool zero_centered_gamma = false;
};

struct ActivationArgs {
  TensorView x;  // [..., F] or, gated, [..., 2F] float32 | bfloat16 | float16
  TensorView y;  // [..., F] float32 | bfloat16 | float16
  Activation kind = Activation::gelu;
  bool gated = false;
};

// dx = dy * act'(x); gated: (dy * b * act'(a) | dy * act(a))
struct ActivationGradArgs {
  TensorView dy;  // [..., F] float32 | bfloat16 | float16
  TensorView x;   // [..., F] or [..., 2F] float32 | bfloat16 | float16
  TensorView dx;  // x's shape, float32 | bfloat16 | float16
  Activation kind = Activation::gelu;
  bool gated = false;
};

Status norm(const NormArgs&, const Execution&);
Status norm_grad(const NormGradArgs&, const Execution&);
Status activation(const ActivationArgs&, const Execution&);
Status activation_grad(const ActivationGradArgs&, const Execution&);

// Sums over rows are taken in chunks of so many rows: in a chunk in ascending row order, then over chunks ascending.
inline constexpr int64_t kSumChunk = 128;

// CUDA workspace sizes, functions of the shape alone.
int64_t norm_grad_workspace_bytes(int64_t m, int64_t k);
int64_t column_sum_workspace_bytes(int64_t m, int64_t k);

}  // namespace diptych
