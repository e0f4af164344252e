// The steps around a cuBLASLt product: before it, scales are brought into its layout; after it, bias and beta * C are
// added.
#pragma once

#include "diptych/gemm.h"

namespace diptych::cuda {

// One operand's block scales, from [blocks, k_blocks] to cuBLASLt's layout.
struct ScaleLayoutJob {
  const float* from = nullptr;
  float* to = nullptr;  // [k_blocks, blocks] if transposed, else [blocks, k_stride] with zeros past k_blocks
  int64_t blocks = 0;   // along the outer dimension
  int64_t k_blocks = 0;
  int64_t k_stride = 0;
  bool transposed = false;
};
Status lay_out_scales(const ScaleLayoutJob (&jobs)[2], const Execution&);  // one launch for both operands

// D = cast(acc + bias + beta * C); acc [m, n] float32 already holds alpha * product and may be D itself.
Status finish_gemm(const float* acc, const GemmArgs&, const Execution&);

}  // namespace diptych::cuda
