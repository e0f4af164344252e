// The native grouped kernel for per-tensor scales, which are applied at the end of a tile.
#include "cuda/products/sm90.cuh"

namespace diptych::cuda {

Status launch_native_tensor(const NativeArgs& p, const NativeLaunch& l, const Execution& exec) {
  return l.promotion == Promotion::none ? launch_native<Promotion::none>(p, l, exec)
                                        : launch_native<Promotion::plain>(p, l, exec);
}

}  // namespace diptych::cuda
