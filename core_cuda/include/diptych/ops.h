// The ops. Each takes plain arguments, checks them before anything runs, and fills outputs that the caller allocated.
// No op allocates device memory, synchronizes, or keeps state between calls.
#pragma once

#include "diptych/format.h"
#include "diptych/status.h"
#include "diptych/tensor.h"

namespace diptych {

// One copy of a quantized [m, k] tensor. Rowwise data has the tensor's shape; columnwise data is [k, m] where the
// format's columnwise layout is `transposed`. Scales are logical row-major (see scale_shape; per-tensor: one element).
struct QuantizedView {
  FormatId format{};
  bool columnwise = false;
  TensorView data;
  TensorView scale_inv;

  bool given() const { return data.given(); }
};

struct QuantSpec {
  FormatId format{};
  bool pow2 = false;  // ScaleRule::divide: floor the scale to a power of two
  float eps = 0.0f;   // ScaleRule::divide: lower bound of amax
};

struct AmaxArgs {  // out[0] = max over non-NaN |x|, 0 where there is none
  TensorView x;    // [..., K] float32 | bfloat16 | float16
  TensorView out;  // [1] float32
};

struct QuantizeArgs {
  TensorView x;  // [..., K] float32 | bfloat16 | float16
  QuantSpec spec;
  TensorView amax;  // [1] float32, per-tensor formats only: read if amax_ready, else computed here and written
  bool amax_ready = false;
  QuantizedView rowwise;  // either or both
  QuantizedView columnwise;
};

struct DequantizeArgs {
  QuantizedView q;
  TensorView out;  // [M, K] in the tensor's own orientation, also from a transposed copy
};

// D = alpha * op(A) @ op(B) + bias + beta * C, float32 accumulation, D [M, N].
// An operand reduces over its columns in the rowwise copy and over its rows in the columnwise copy.
struct GemmArgs {
  QuantizedView a;       // rowwise: [M, K]; columnwise: of a [K, M] tensor
  QuantizedView b;       // rowwise: [N, K]; columnwise: of a [K, N] tensor
  TensorView d;          // [M, N] float32 | bfloat16 | float16
  TensorView c;          // [M, N] of d's dtype, may be d itself; absent: beta must be 0
  TensorView bias;       // [N] float32 | bfloat16 | float16, optional
  TensorView workspace;  // uint8, at least gemm_workspace_bytes, 16-byte aligned; CUDA only
  float alpha = 1.0f;
  float beta = 0.0f;
  bool fast_accum = false;  // Hopper's reduced-precision accumulation; per-tensor formats only
};

struct BiasGradArgs {    // out[n] = sum over rows of dy[., n] in float32, in an order fixed by the shape
  TensorView dy;         // [..., N] float32 | bfloat16 | float16
  TensorView out;        // [N] float32 | bfloat16 | float16
  TensorView workspace;  // uint8, at least bias_grad_workspace_bytes, 16-byte aligned; CUDA only
};

Status amax(const AmaxArgs&, const Execution&);
Status quantize(const QuantizeArgs&, const Execution&);
Status dequantize(const DequantizeArgs&, const Execution&);
Status gemm(const GemmArgs&, const Execution&);
Status bias_grad(const BiasGradArgs&, const Execution&);

// CUDA workspace sizes. Functions of the shape alone, so that a tracer can ask.
// `epilogue`: a bias is given or beta is not 0, so that the product may have to be held in float32.
int64_t gemm_workspace_bytes(int64_t m, int64_t n, int64_t k, bool epilogue);
int64_t bias_grad_workspace_bytes(int64_t m, int64_t n);

}  // namespace diptych
