// Sums before each element, over one block.
#pragma once

#include <cuda_runtime.h>

namespace diptych::cuda {

// put(i, value(0) + ... + value(i - 1)) for i < n, sums and values at most `limit` < 2^31; returns the whole sum. Every
// thread comes here, and afterwards sees what the others put. value(i) may be what put(i) overwrites.
template <typename Value, typename Put>
__device__ __forceinline__ unsigned block_scan(int n, unsigned limit, Value&& value, Put&& put) {
  __shared__ unsigned warp_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int per = (n + blockDim.x - 1) / blockDim.x;
  const int first = min(n, static_cast<int>(threadIdx.x) * per), last = min(n, first + per);
  unsigned sum = 0;
  for (int i = first; i < last; ++i) sum = min(sum + value(i), limit);
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const unsigned below = __shfl_up_sync(0xffffffff, sum, d);
    if (lane >= d) sum = min(sum + below, limit);
  }
  if (lane == 31) warp_sums[warp] = sum;
  unsigned at = __shfl_up_sync(0xffffffff, sum, 1);
  if (lane == 0) at = 0;
  __syncthreads();
  unsigned total = 0;
  for (int w = 0; w < warps; ++w) {
    if (w == warp) at = min(at + total, limit);
    total = min(total + warp_sums[w], limit);
  }
  for (int i = first; i < last; ++i) {
    const unsigned next = min(at + value(i), limit);
    put(i, at);
    at = next;
  }
  __syncthreads();
  return total;
}

}  // namespace diptych::cuda
