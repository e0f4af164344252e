// Products of quantized operands, and the bias gradient.
#pragma once

#include "diptych/quantize.h"

namespace diptych {

// The options of a product that change its numbers; each is a bool. GemmOptions, the Python module's arguments and
// XLA's attributes expand this list, each with its own F(type, name).
//   fast_accum: Hopper's reduced-precision accumulation; per-tensor formats only
#define DIPTYCH_GEMM_OPTIONS(F, type) F(type, fast_accum)

struct GemmOptions {
#define DIPTYCH_OPTION(type, name) type name = false;
  DIPTYCH_GEMM_OPTIONS(DIPTYCH_OPTION, bool)
#undef DIPTYCH_OPTION
};

// D = alpha * op(A) @ op(B) + bias + beta * C, float32 accumulation, D [M, N].
// An operand reduces over its columns in the rowwise copy and over its rows in the columnwise copy. Amaxes of two-level
// operands are multiplied into alpha: ((alpha * amax_a) * amax_b) * float32(1 / (36 * 448 * 448)); if only one operand
// is two-level: (alpha * amax) * float32(1 / 2688).
struct GemmArgs {
  QuantizedView a;       // rowwise: [M, K]; columnwise: of a [K, M] tensor
  QuantizedView b;       // rowwise: [N, K]; columnwise: of a [K, N] tensor
  TensorView d;          // [M, N] float32 | bfloat16 | float16
  TensorView c;          // [M, N] of d's dtype, may be d itself; absent: beta must be 0
  TensorView bias;       // [N] float32 | bfloat16 | float16, optional
  TensorView workspace;  // uint8, at least gemm_workspace_bytes, 16-byte aligned; CUDA only
  float alpha = 1.0f;
  float beta = 0.0f;
  GemmOptions options;
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(GemmArgs& a, F&& f) {
  fields(a.a, f), fields(a.b, f), f(a.d, Role::output), f(a.c, Role::in_place), f(a.bias),
      f(a.workspace, Role::workspace);
}

struct BiasGradArgs {    // out[n] = sum over rows of dy[., n] in float32, in an order fixed by the shape
  TensorView dy;         // [..., N] float32 | bfloat16 | float16
  TensorView out;        // [N] float32 | bfloat16 | float16
  TensorView workspace;  // uint8, at least bias_grad_workspace_bytes, 16-byte aligned; CUDA only
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(BiasGradArgs& a, F&& f) {
  f(a.dy), f(a.out, Role::output), f(a.workspace, Role::workspace);
}

DIPTYCH_OP(gemm, GemmArgs)
DIPTYCH_OP(bias_grad, BiasGradArgs)

// CUDA workspace sizes in bytes. They depend on formats and shape alone, so that a tracer can compute them. `epilogue`:
// whether a bias is given or beta is not 0; the workspace may then need room for the product in float32.
int64_t gemm_workspace_bytes(FormatId a, FormatId b, int64_t m, int64_t n, int64_t k, bool epilogue);
int64_t bias_grad_workspace_bytes(int64_t m, int64_t n);

}  // namespace diptych
