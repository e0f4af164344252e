// Products of groups: one launch computes all experts of a layer. Kernels read group sizes on the device, so that
// routing never waits for the host.
//
// Group g is the rows offsets[g] <= r < offsets[g + 1] of a tensor of R rows; rows before offsets[0] and rows from
// offsets[G] on are in no group. Groups may be empty. The CPU refuses offsets that descend, lie outside of 0..R or are
// not multiples of `align`; CUDA reads them inside the kernel and clamps each to at least the one before and at most R.
//
//   rows    D[r] = alpha * op(A)[r] @ op(B[g]) + bias[g] + beta * C[r]     fprop and dgrad: R rows, one B for each
//   group
//           rows in no group: +0 (+ beta * C)
//   depth   D[g] = alpha * sum over the rows r of group g of A[r].T B[r] + beta * C[g]                            wgrad
//           empty groups: +0 (+ beta * C)
#pragma once

#include "diptych/gemm.h"
#include "diptych/stack.h"

namespace diptych {

// Numbered as the frontends pass them.
enum class GroupKind : int32_t { rows, depth, count_ };

// Copies, scales and amaxes are as in GemmArgs. A stack of G tensors has a leading G everywhere: data [G, ...], block
// scales [G, ...], per-tensor scales [G], amaxes of two-level formats [G].
struct GroupedGemmArgs {
  QuantizedView a;       // rows: rowwise, [R, K]; depth: columnwise, of an [R, M] tensor
  QuantizedView b;       // rows: a stack, rowwise [G, N, K] or columnwise of [G, K, N]; depth: columnwise, of [R, N]
  TensorView offsets;    // [G + 1] int32
  TensorView d;          // rows: [R, N]; depth: [G, M, N]; float32 | bfloat16 | float16
  TensorView c;          // d's shape and dtype, may be d itself; absent: beta must be 0
  TensorView bias;       // rows: [G, N] float32 | bfloat16 | float16, optional
  TensorView workspace;  // uint8, at least grouped_gemm_workspace_bytes, 16-byte aligned; CUDA only
  GroupKind kind = GroupKind::rows;
  int32_t align = 1;     // 1, 16, 32 or 128: the caller promises that every offset is a multiple; tensor cores need it
  bool rotated = false;  // depth: both copies are Hadamard-rotated in groups of 16 rows; needs align % 16 == 0
  float alpha = 1.0f;
  float beta = 0.0f;
  GemmOptions options;
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(GroupedGemmArgs& a, F&& f) {
  fields(a.a, f), fields(a.b, f), f(a.offsets), f(a.d, Role::output), f(a.c, Role::in_place), f(a.bias),
      f(a.workspace, Role::workspace);
}

// The gradient of a bias [G, N]: out[g] = sum of dy's rows in group g. Each group's sum has the bits that bias_grad
// gives for its rows alone; a group without rows gives +0.
struct GroupedBiasGradArgs {
  TensorView dy;         // [R, N] float32 | bfloat16 | float16
  TensorView offsets;    // [G + 1] int32
  TensorView out;        // [G, N] float32 | bfloat16 | float16
  TensorView workspace;  // uint8, at least grouped_bias_grad_workspace_bytes, 16-byte aligned; CUDA only
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(GroupedBiasGradArgs& a, F&& f) {
  f(a.dy), f(a.offsets), f(a.out, Role::output), f(a.workspace, Role::workspace);
}

DIPTYCH_OP(grouped_gemm, GroupedGemmArgs)
DIPTYCH_OP(grouped_bias_grad, GroupedBiasGradArgs)

// CUDA workspace sizes, functions of the formats and shapes alone.
// `m`, `n`: of each D for kind depth, of the whole D for kind rows; `k`: the whole reduced dimension.
int64_t grouped_gemm_workspace_bytes(FormatId a, FormatId b, GroupKind kind, int64_t m, int64_t n, int64_t k,
                                     int64_t groups);
int64_t grouped_bias_grad_workspace_bytes(int64_t rows, int64_t cols, int64_t groups);

}  // namespace diptych
