// hash (NUMERICS 10): a warp takes one block of 1024 bytes at a time, and sums of thread blocks are added by atomics.
//
// A thread has two vectors of 16 bytes of each block, always at the same places, so that its keys stay in registers.
// Small tensors take one thread block, which finishes alone. Else `out` holds both sums until the last kernel.
#include <algorithm>

#include "cuda/base/launch.cuh"
#include "diptych/format.h"
#include "diptych/hash.h"

namespace diptych::cuda {
namespace {

using Sum = unsigned long long;  // what atomicAdd takes

constexpr int kThreads = 256, kWarps = kThreads / 32, kPerSm = 4;
constexpr int kWords = 256, kBlock = 4 * kWords;  // of a block of the hash: words, bytes
constexpr int kVecs = kBlock / 16 / 32;           // of a thread
constexpr int kAlone = 4 * kWarps;                // blocks that one thread block takes
constexpr Sum kGolden = 0x9E3779B97F4A7C15;

struct HashParams {
  const uint8_t* x;
  int64_t bytes, blocks;
  Sum* sums;
  int width;   // bytes of a load: 16, 4 or 1, by the alignment of x
  bool alone;  // one thread block, which finishes
};

__device__ __forceinline__ Sum mix(Sum z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}
__device__ __forceinline__ Sum split_mix(Sum n) { return mix((n + 1) * kGolden); }

__device__ __forceinline__ void finish(Sum x, Sum y, int64_t bytes, Sum* out) {
  x += static_cast<Sum>(bytes), y += kGolden;
  x += y, y += x;
  x = mix(x), y = mix(y);
  x += y, y += x;
  out[0] = x, out[1] = y;
}

// Loads four words at x, of which `left` bytes belong to the tensor; the others are zero.
__device__ __forceinline__ void load_words(const uint8_t* x, int64_t left, int width, uint32_t (&w)[4]) {
  if (left >= 16 && width == 16) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(x));
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  } else if (left >= 16 && width == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = __ldg(reinterpret_cast<const uint32_t*>(x) + i);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (4 * i + j < left) w[i] |= static_cast<uint32_t>(__ldg(x + 4 * i + j)) << (8 * j);
    }
  }
}

__global__ void __launch_bounds__(kThreads, kPerSm) hash_kernel(const __grid_constant__ HashParams p) {
  __shared__ Sum of_warps[kWarps][2];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t keys[2][4 * kVecs];
#pragma unroll
  for (int i = 0; i < 4 * kVecs; ++i) {
    const Sum key = split_mix(static_cast<Sum>(i / 4 * 128 + 4 * lane + i % 4));
    keys[0][i] = static_cast<uint32_t>(key), keys[1][i] = static_cast<uint32_t>(key >> 32);
  }
  Sum sums[2] = {0, 0};
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t b = static_cast<int64_t>(blockIdx.x) * kWarps + warp; b < p.blocks; b += step) {
    uint32_t w[kVecs][4];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int64_t at = b * kBlock + (i * 32 + lane) * 16;
      load_words(p.x + at, p.bytes - at, p.width, w[i]);
    }
    // v is u without its 2^32. u0 u1 is v0 v1 + 2^32 (v0 + v1) modulo 2^64, and `words` has the sums of v.
    Sum products[2] = {0, 0};
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 4 * kVecs; i += 2) {
      const uint32_t even = w[i / 4][i % 4], odd = w[i / 4][i % 4 + 1];
      const uint32_t v[2][2] = {
          {even + keys[0][i], odd + keys[0][i + 1]},
          {__byte_perm(even, 0, 0x1032) + keys[1][i], __byte_perm(odd, 0, 0x1032) + keys[1][i + 1]}};
#pragma unroll
      for (int l = 0; l < 2; ++l) products[l] += static_cast<Sum>(v[l][0]) * v[l][1], words[l] += v[l][0] + v[l][1];
    }
#pragma unroll
    for (int l = 0; l < 2; ++l)
      sums[l] +=
          (split_mix(kWords + 2 * static_cast<Sum>(b) + l) | 1) * (products[l] + (static_cast<Sum>(words[l]) << 32));
  }
#pragma unroll
  for (int l = 0; l < 2; ++l) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sums[l] += __shfl_xor_sync(0xffffffff, sums[l], mask);
    if (lane == 0) of_warps[warp][l] = sums[l];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  Sum total[2] = {0, 0};
  for (int i = 0; i < kWarps; ++i) total[0] += of_warps[i][0], total[1] += of_warps[i][1];
  if (p.alone) return finish(total[0], total[1], p.bytes, p.sums);
  atomicAdd(p.sums, total[0]);
  atomicAdd(p.sums + 1, total[1]);
}

__global__ void finish_kernel(Sum* sums, int64_t bytes) {
  if (threadIdx.x == 0) finish(sums[0], sums[1], bytes, sums);
}

}  // namespace

Status hash(const HashArgs& a, const Execution& exec) {
  HashParams p{a.x.as<const uint8_t>(), a.x.numel() * bytes(a.x.dtype)};
  p.blocks = ceil_div(p.bytes, kBlock);
  p.sums = a.out.as<Sum>();
  p.width = aligned(p.x, 16) ? 16 : aligned(p.x, 4) ? 4 : 1;
  p.alone = p.blocks <= kAlone;
  if (p.alone) return launch("hash", hash_kernel, 1, kThreads, 0, exec.stream, p);
  DIPTYCH_CUDA_TRY(cudaMemsetAsync(p.sums, 0, 2 * sizeof(Sum), static_cast<cudaStream_t>(exec.stream)));
  const int64_t most = static_cast<int64_t>(device_info(exec.device.index).sm_count) * kPerSm;
  DIPTYCH_TRY(launch("hash", hash_kernel, std::min(ceil_div(p.blocks, kWarps), most), kThreads, 0, exec.stream, p));
  return launch("hash", finish_kernel, 1, 32, 0, exec.stream, p.sums, p.bytes);
}

}  // namespace diptych::cuda
