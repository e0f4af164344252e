// out[0] = max over non-NaN |x|. A maximum does not depend on its order, so blocks may meet in an atomic.
#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/vector.cuh"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 256, kUnroll = 4;

// x: `head` elements up to a 16-byte boundary, then vectors, then a tail.
template <typename T>
__global__ void __launch_bounds__(kThreads) amax_kernel(const T* __restrict__ x, int64_t n, int head, unsigned* out) {
  constexpr int kN = Vec<T>::kCount;
  const int tid = threadIdx.x;
  const int64_t vectors = (n - head) / kN;
  float m = 0.0f;

  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * kUnroll;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kUnroll + tid; first < vectors; first += stride) {
    Vec<T> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kThreads < vectors) v[u] = Vec<T>::load(x + head + (first + u * kThreads) * kN);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) m = max_abs(m, v[u]);
  }
  if (blockIdx.x == 0) {
    if (tid < head) m = max_abs(m, to_float(x[tid]));
    const int64_t tail = head + vectors * kN + tid;
    if (tail < n) m = max_abs(m, to_float(x[tail]));
  }

  __shared__ float warp_max[kThreads / 32];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, mask));
  if (tid % 32 == 0) warp_max[tid / 32] = m;
  __syncthreads();
  if (tid == 0) {
#pragma unroll
    for (int w = 1; w < kThreads / 32; ++w) m = fmaxf(m, warp_max[w]);
    if (m > 0.0f) atomicMax(out, bits_of(m));  // non-negative floats order as their bits do
  }
}

}  // namespace

Status amax(const AmaxArgs& args, const Execution& exec) {
  const int64_t n = args.x.numel();
  DIPTYCH_CUDA_TRY(cudaMemsetAsync(args.out.data, 0, sizeof(float), static_cast<cudaStream_t>(exec.stream)));
  if (n == 0) return {};
  return with_float_type(args.x.dtype, "amax", [&](auto type) {
    using T = decltype(type);
    const T* x = args.x.as<const T>();
    const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(x) % 16);
    const int64_t head = std::min<int64_t>(n, (16 - past) % 16 / static_cast<int64_t>(sizeof(T)));
    const int64_t vectors = (n - head) / Vec<T>::kCount;
    const int64_t wanted = std::max<int64_t>(1, ceil_div(vectors, kThreads * kUnroll));
    const int64_t blocks = std::min<int64_t>(wanted, std::max(1, device_info(exec.device.index).sm_count) * 8);
    return launch("amax", amax_kernel<T>, blocks, kThreads, 0, exec.stream, x, n, static_cast<int>(head),
                  args.out.as<unsigned>());
  });
}

}  // namespace diptych::cuda
