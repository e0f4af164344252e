// What the quantize kernels share. Which of them runs, the kernel table says (src/registry.cpp).
#pragma once

#include "cuda/base/scale.cuh"
#include "cuda/kernels.h"
#include "diptych/stack.h"

namespace diptych::cuda {

DivideRule divide_rule(const QuantizeArgs&);

// Where per-tensor kernels take their scale: from `scale` where it is given (x's amax then joins *join), else from
// `amax`.
struct TensorScale {
  const float* amax = nullptr;
  const float* scale = nullptr;
  float* join = nullptr;
};
TensorScale tensor_scale(const QuantizeArgs&);

Status quantize_tile_stack(const QuantizeArgs&, const Execution&);  // plain tensors with float32 scales

// amax of a source, of the whole tensor; the outputs that are given hold 0 before.
Status source_amax(const AmaxArgs&, const Execution&);
Status permuted_amax(const AmaxArgs&, const Execution&);
Status clear_amax(const TensorView& amax, const Execution&);
Status amax_stack(const TensorView& x, const TensorView& out, const Execution&);  // of each plain tensor

}  // namespace diptych::cuda
