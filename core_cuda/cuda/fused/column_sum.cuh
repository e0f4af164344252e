// Sums over rows in an order that the shape fixes: chunks of kSumChunk rows in ascending row order, then the chunks in
// ascending order. The CPU sums in that order too.
#pragma once

#include "cuda/fused/elements.cuh"
#include "cuda/launch.cuh"
#include "diptych/fused.h"

namespace diptych::cuda {

constexpr int kSumThreads = 256, kSumCols = 256, kSumWarps = kSumThreads / 32;

// part[s * stride + chunk * k + c] for one chunk and 256 columns; produce(row, col, values) gives what rows row and
// columns col .. col + 7 add to each of the kSums sums, zeros outside. Eight rows at a time, one for each warp.
template <int kSums, typename Produce>
__device__ __forceinline__ void sum_chunk(int64_t m, int64_t k, unsigned strips, float* part, int64_t stride,
                                          Produce&& produce) {
  __shared__ __align__(16) float staged[2][kSums][kSumWarps][kSumCols];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t chunk = blockIdx.x / strips, col0 = static_cast<int64_t>(blockIdx.x % strips) * kSumCols;
  const int64_t row0 = chunk * kSumChunk, end = row0 + kSumChunk < m ? row0 + kSumChunk : m;
  float acc[kSums] = {};
  int side = 0;
  for (int64_t row = row0; row < end; row += kSumWarps, side ^= 1) {
    Floats8 v[kSums];
    produce(row + warp, col0 + lane * 8, v);
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      float4* to = reinterpret_cast<float4*>(&staged[side][s][warp][lane * 8]);
      to[0] = make_float4(v[s].v[0], v[s].v[1], v[s].v[2], v[s].v[3]);
      to[1] = make_float4(v[s].v[4], v[s].v[5], v[s].v[6], v[s].v[7]);
    }
    __syncthreads();  // the other side is free by then: whoever reads it has not passed this barrier
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int w = 0; w < kSumWarps; ++w) {
        if (row + w < end) acc[s] += staged[side][s][w][threadIdx.x];
      }
    }
  }
  if (col0 + threadIdx.x >= k) return;
#pragma unroll
  for (int s = 0; s < kSums; ++s) part[s * stride + chunk * k + col0 + threadIdx.x] = acc[s];
}

inline int64_t sum_strips(int64_t k) { return ceil_div(k, kSumCols); }

// out[c] = sum over chunks of part[chunk][c]
Status join_chunks(const char* op, const float* part, int64_t chunks, int64_t k, const TensorView& out,
                   const Execution& exec);

// out[c] = sum over rows of what is encoded; `workspace`: column_sum_workspace_bytes
Status column_sums(const TensorView& x, const Source& source, const TensorView& out, const TensorView& workspace,
                   const Execution& exec);

}  // namespace diptych::cuda
