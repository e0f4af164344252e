// Joins the maxima of a launch's thread blocks.
#pragma once

#include "cuda/base/vector.cuh"

namespace diptych::cuda {

// Raises *cell to the largest m >= 0 of a thread block. A maximum does not depend on order, so blocks may use an
// atomic; non-negative floats order as their bits do. `scratch`: a float for each warp, which is overwritten.
template <int kThreads>
__device__ __forceinline__ void join_amax(float m, float* scratch, float* cell) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, mask));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = m;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int w = 1; w < kThreads / 32; ++w) m = fmaxf(m, scratch[w]);
  // The cell only grows: an m that is not above an old value of it needs no atomic.
  if (m > *static_cast<const volatile float*>(cell))
    atomicMax(reinterpret_cast<int*>(cell), static_cast<int>(bits_of(m)));
}

}  // namespace diptych::cuda
