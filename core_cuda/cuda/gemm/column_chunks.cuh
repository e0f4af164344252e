// Column sums in float32. The number of rows alone fixes the order of additions: each chunk of 256 rows is summed in
// eight interleaved runs, whose sums are added in ascending order; then the chunks' sums are added the same way. No
// atomics.
#pragma once

#include "cuda/base/launch.cuh"
#include "cuda/base/vector.cuh"

namespace diptych::cuda {

constexpr int kChunk = 256, kRuns = 8, kSumThreads = 32 * kRuns, kUnroll = 4;

// Writes the column sums of one chunk, rows [row, end), to partial[.] for the columns of 32 vectors from col0 on. Each
// thread sums every eighth row for the columns of one 16-byte vector.
template <typename T>
__device__ __forceinline__ void sum_chunk(const T* __restrict__ dy, int64_t row, int64_t end, int64_t n, int64_t col0,
                                          bool vec, float* __restrict__ partial) {
  constexpr int kN = Vec<T>::kCount;
  __shared__ float sums[kRuns][32 * kN];
  const int lane = threadIdx.x % 32, run = threadIdx.x / 32;
  const int64_t col = col0 + lane * kN;

  float acc[kN] = {};
  for (row += run; row < end; row += kRuns * kUnroll) {
    Vec<T> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t r = row + u * kRuns;
      if (r >= end || col >= n) continue;
      const T* p = dy + r * n + col;
      if (vec) {
        v[u] = Vec<T>::load(p);
      } else {
#pragma unroll
        for (int i = 0; i < kN; ++i) {
          if (col + i >= n) continue;
          if constexpr (sizeof(T) == 4) {
            v[u].w[i] = __builtin_bit_cast(uint32_t, p[i]);
          } else {
            v[u].w[i / 2] |= static_cast<uint32_t>(__builtin_bit_cast(unsigned short, p[i])) << (i % 2 * 16);
          }
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int i = 0; i < kN; ++i) acc[i] = __fadd_rn(acc[i], v[u][i]);  // vectors past the end are 0
    }
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) sums[run][lane * kN + i] = acc[i];
  __syncthreads();
  for (int c = threadIdx.x; c < 32 * kN && col0 + c < n; c += kSumThreads) {
    float s = sums[0][c];
#pragma unroll
    for (int r = 1; r < kRuns; ++r) s = __fadd_rn(s, sums[r][c]);
    partial[col0 + c] = s;
  }
}

// out[.] = the sum of partial[chunk, .] over all chunks, for 32 columns from col0 on, in eight interleaved runs.
template <typename T>
__device__ __forceinline__ void join_chunks(const float* __restrict__ partial, int64_t chunks, int64_t n, int64_t col0,
                                            T* __restrict__ out) {
  __shared__ float sums[kRuns][32];
  const int lane = threadIdx.x % 32, run = threadIdx.x / 32;
  const int64_t col = col0 + lane;
  float s = 0.0f;
  if (col < n) {
#pragma unroll 4
    for (int64_t c = run; c < chunks; c += kRuns) s = __fadd_rn(s, partial[c * n + col]);
  }
  sums[run][lane] = s;
  __syncthreads();
  if (run != 0 || col >= n) return;
#pragma unroll
  for (int r = 1; r < kRuns; ++r) s = __fadd_rn(s, sums[r][lane]);
  out[col] = from_float<T>(s);
}

}  // namespace diptych::cuda
