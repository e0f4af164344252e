// The native grouped kernel for 1 x 128 and 128 x 128 blocks: their scales multiply the partial sum of each 128 k.
#include "cuda/products/sm90.cuh"

namespace diptych::cuda {

Status launch_native_block(const NativeArgs& p, const NativeLaunch& l, const Execution& exec) {
  return l.promotion == Promotion::columns ? launch_native<Promotion::columns>(p, l, exec)
                                           : launch_native<Promotion::full>(p, l, exec);
}

}  // namespace diptych::cuda
