// The quantize kernels behind one entry: which one runs follows from the format row's columns.
#pragma once

#include "cuda/base/scale.cuh"
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

Status quantize_stream(const QuantizeArgs&, const Execution&);      // per-tensor, rowwise copy of x alone
Status quantize_tiles(const QuantizeArgs&, const Execution&);       // float32 scales: per-tensor, 1x128, 128x128
Status quantize_mxfp8(const QuantizeArgs&, const Execution&);       // 1x32 with E8M0 scales
Status quantize_tile_stack(const QuantizeArgs&, const Execution&);  // that of plain tensors with float32 scales
Status quantize_nvfp4(const QuantizeArgs&, const Execution&);       // E2M1 1x16 with E4M3 scales

// Permuted rows of which a rowwise copy alone is wanted, in FP8 and without blocks that span them.
bool permuted_rows_fit(const QuantizeArgs&);
Status quantize_permuted_rows(const QuantizeArgs&, const Execution&);

// Both copies of permuted rows of 16 bits an element in one gather, in blocks of 1x128 or 1x32.
bool permuted_both_fits(const QuantizeArgs&);
Status permuted_both(const QuantizeArgs&, const Execution&);

// amax of a source, of the whole tensor; the outputs that are given hold 0 before.
Status source_amax(const AmaxArgs&, const Execution&);
Status permuted_amax(const AmaxArgs&, const Execution&);
Status clear_amax(const TensorView& amax, const Execution&);
Status amax_stack(const TensorView& x, const TensorView& out, const Execution&);  // of each plain tensor

}  // namespace diptych::cuda
