// Sums over rows in an order that the shape fixes: each chunk of kSumChunk rows in ascending row order, then the chunks
// in ascending order. The CPU uses the same order.
#pragma once

#include "cuda/base/launch.cuh"
#include "cuda/source/elements.cuh"
#include "diptych/source.h"

namespace diptych::cuda {

constexpr int kSumThreads = 256, kSumCols = 256, kSumWarps = kSumThreads / 32;

// A thread block's chunk and 256 columns; row() and col() are the first row and column of this thread's part of eight
// rows.
struct ChunkPlace {
  int64_t chunk, row0, col0;

  __device__ __forceinline__ explicit ChunkPlace(unsigned strips)
      : chunk(blockIdx.x / strips),
        row0(chunk * kSumChunk),
        col0(static_cast<int64_t>(blockIdx.x % strips) * kSumCols) {}
  __device__ __forceinline__ int64_t row() const { return row0 + threadIdx.x / 32; }
  __device__ __forceinline__ int64_t col() const { return col0 + threadIdx.x % 32 * 8; }
};

// Writes part[s * stride + chunk * k + c] for one chunk and 256 columns. It takes eight rows at a time, one for each
// warp: load(i) loads columns place.col() .. + 7 of row place.row() + 8 i, and values(i, raw, v) computes from them the
// summands of each of the kSums sums, zeros outside. The next rows are loaded while some are added.
template <int kSums, typename Load, typename Values>
__device__ __forceinline__ void sum_chunk(const ChunkPlace& place, int64_t m, int64_t k, float* part, int64_t stride,
                                          Load&& load, Values&& values) {
  __shared__ __align__(16) float staged[2][kSums][kSumWarps][kSumCols];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t left = m - place.row0;
  const int rows = left < kSumChunk ? static_cast<int>(left) : static_cast<int>(kSumChunk);
  float acc[kSums] = {};
  auto next = load(0);
  for (int i = 0; i * kSumWarps < rows; ++i) {
    const int side = i % 2;
    Floats8 v[kSums];
    const auto now = next;
    if ((i + 1) * kSumWarps < rows) next = load(i + 1);
    values(i, now, v);
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      float4* to = reinterpret_cast<float4*>(&staged[side][s][warp][lane * 8]);
      to[0] = make_float4(v[s].v[0], v[s].v[1], v[s].v[2], v[s].v[3]);
      to[1] = make_float4(v[s].v[4], v[s].v[5], v[s].v[6], v[s].v[7]);
    }
    // All threads have read the other side before this barrier, so that the next iteration may overwrite it.
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int w = 0; w < kSumWarps; ++w) {
        if (i * kSumWarps + w < rows) acc[s] += staged[side][s][w][threadIdx.x];
      }
    }
  }
  const int64_t col = place.col0 + threadIdx.x;
  if (col >= k) return;
#pragma unroll
  for (int s = 0; s < kSums; ++s) part[s * stride + place.chunk * k + col] = acc[s];
}

inline int64_t sum_strips(int64_t k) { return ceil_div(k, kSumCols); }

// out[c] = sum over chunks of part[chunk][c], and if `second` is given, the same for it and the chunks after those
Status join_chunks(const char* op, const float* part, int64_t chunks, int64_t k, const TensorView& out,
                   const TensorView& second, const Execution& exec);

// out[c] = sum over the encoded rows; `workspace` has column_sum_workspace_bytes
Status column_sums(const TensorView& x, const Source& source, const TensorView& out, const TensorView& workspace,
                   const Execution& exec);

}  // namespace diptych::cuda
