// The quantize kernels behind one entry: which one runs follows from the format row's columns.
#pragma once

#include "cuda/scale.cuh"
#include "diptych/ops.h"

namespace diptych::cuda {

DivideRule divide_rule(const QuantizeArgs&);

Status quantize_stream(const QuantizeArgs&, const Execution&);  // per-tensor, rowwise copy alone
Status quantize_tiles(const QuantizeArgs&, const Execution&);   // float32 scales: per-tensor, 1x128, 128x128
Status quantize_mxfp8(const QuantizeArgs&, const Execution&);   // 1x32 with E8M0 scales

}  // namespace diptych::cuda
