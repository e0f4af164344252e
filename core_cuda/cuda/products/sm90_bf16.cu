// Operands decoded to bfloat16: no scale is left but per-tensor ones, which the epilogue multiplies.
#include "cuda/products/sm90.cuh"

namespace diptych::cuda {

Status launch_native_bf16(const NativeArgs& p, const NativeLaunch& l, const Execution& exec) {
  // float32 results are stored in pieces, which leaves shared memory to operands.
  constexpr auto kBF16 = ptx::Element::bf16;
  return l.many ? launch_native<Promotion::none, false, kBF16, kBF16, false, kManyDecoders>(p, l, exec)
                : launch_native<Promotion::none, false, kBF16, kBF16, false, kFewDecoders>(p, l, exec);
}

}  // namespace diptych::cuda
