// Prefix sums over one thread block.
#pragma once

#include <cuda_runtime.h>

namespace diptych::cuda {

// Returns the sum over this lane and the lanes before it in the warp, at most `limit`.
__device__ __forceinline__ unsigned warp_scan(unsigned sum, unsigned limit) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const unsigned below = __shfl_up_sync(0xffffffff, sum, d);
    if (static_cast<int>(threadIdx.x % 32) >= d) sum = min(sum + below, limit);
  }
  return sum;
}

// Calls put(i, value(0) + ... + value(i - 1)) for i < n; sums and values are at most `limit` < 2^31. Returns the whole
// sum. All threads of the block call it, and afterwards see what the others have put. put(i) may overwrite value(i).
template <typename Value, typename Put>
__device__ __forceinline__ unsigned block_scan(int n, unsigned limit, Value&& value, Put&& put) {
  __shared__ unsigned warp_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  unsigned total = 0;
  for (int i0 = 0; i0 < n; i0 += blockDim.x) {
    const int i = i0 + threadIdx.x;
    const unsigned upto = warp_scan(i < n ? value(i) : 0, limit);
    if (i0 != 0) __syncthreads();  // all threads have read the last sums
    if (lane == 31) warp_sums[warp] = upto;
    __syncthreads();
    const unsigned sums = warp_scan(lane < warps ? warp_sums[lane] : 0, limit);
    const unsigned earlier = __shfl_sync(0xffffffff, sums, (warp + 31) % 32);
    const unsigned before = __shfl_up_sync(0xffffffff, upto, 1);
    const unsigned first = warp == 0 ? total : min(total + earlier, limit);
    if (i < n) put(i, lane == 0 ? first : min(first + before, limit));
    total = min(total + __shfl_sync(0xffffffff, sums, 31), limit);
  }
  __syncthreads();
  return total;
}

}  // namespace diptych::cuda
