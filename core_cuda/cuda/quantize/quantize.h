// Helpers of the quantize kernels. The kernel table (src/registry.cpp) decides which kernel runs.
#pragma once

#include "cuda/base/scale.cuh"
#include "cuda/kernels.h"
#include "diptych/stack.h"

namespace diptych::cuda {

DivideRule divide_rule(const QuantizeArgs&);

// The scale of per-tensor kernels: `scale` if it is given (the kernel then raises *join to x's amax), else computed
// from `amax`.
struct TensorScale {
  const float* amax = nullptr;
  const float* scale = nullptr;
  float* join = nullptr;
};
TensorScale tensor_scale(const QuantizeArgs&);

Status quantize_tile_stack(const QuantizeArgs&, const Execution&);  // plain tensors with float32 scales

// source_amax and permuted_amax: the amax of a whole source; the given outputs must hold 0.
Status source_amax(const AmaxArgs&, const Execution&);
Status permuted_amax(const AmaxArgs&, const Execution&);
Status clear_amax(const TensorView& amax, const Execution&);
Status amax_stack(const TensorView& x, const TensorView& out, const Execution&);  // amax of each tensor of a stack

}  // namespace diptych::cuda
