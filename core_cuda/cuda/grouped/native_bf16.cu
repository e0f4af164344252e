// Operands decoded to bfloat16: no scale is left but per-tensor ones, which the epilogue multiplies.
#include "cuda/grouped/native.cuh"

namespace diptych::cuda {

Status launch_native_bf16(const NativeArgs& p, const NativeLaunch& l, const Execution& exec) {
  // float32 results are stored in pieces, which leaves shared memory to operands.
  return launch_native<Promotion::none, false, ptx::Element::bf16, ptx::Element::bf16, false>(p, l, exec);
}

}  // namespace diptych::cuda
