// Sources: quantize and amax can read a norm or an activation of their input x, or x's rows in the order of a map.
#pragma once

#include "diptych/activation.h"
#include "diptych/norm.h"

namespace diptych {

// What an op encodes. norm, activation, activation_grad: float32 values computed from x, never rounded to a narrower
// type; permuted: x's rows in the order of a map (permute.h), zeros for absent rows; plain: x itself.
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
  TensorView dy;      // activation_grad: [M, F]; the result has x's shape
  // permuted: the result is [rows, K]. If the two maps disagree, the rows that are read are unspecified, but in bounds.
  TensorView row_id_map;  // [M, slots] int32: where x's rows go
  TensorView row_source;  // [rows] int32: where each row comes from
};

// The rows and columns of the encoded tensor.
struct Extent {
  int64_t rows, cols;
};
inline Extent encoded_extent(const TensorView& x, const Source& s) {
  return {s.kind == SourceKind::permuted ? s.row_source.numel() : x.rows(),
          s.kind == SourceKind::activation && s.gated ? x.cols() / 2 : x.cols()};
}

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(Source& a, F&& f) {
  f(a.gamma), f(a.beta), f(a.mu), f(a.rsigma), f(a.dy), f(a.row_id_map), f(a.row_source);
}

// Sums over rows are computed in chunks of this many rows: within a chunk in ascending row order, then over the chunks
// in ascending order.
inline constexpr int64_t kSumChunk = 128;

// CUDA workspace size, a function of the shape alone.
int64_t column_sum_workspace_bytes(int64_t m, int64_t k);

}  // namespace diptych
