#include <algorithm>

#include "cuda/base/launch.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/quantize/permuted/scale_runs.cuh"

namespace diptych::cuda {

// Reads all of a group's memory, then writes it in order. It moves whole lines, because requests are what costs L2
// time.
__device__ __forceinline__ void ScaleRuns::order(uint32_t block, uint32_t* held) const {
  const uint32_t rows_index = by_groups_(block), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row0 = static_cast<int64_t>(rows_index) * kTile;
  const uint32_t count = static_cast<uint32_t>(min(rows_ - row0, int64_t{kTile}));
  const Group g(*this, row0, block - rows_index * groups_);
  if (count == kTile && g.width % 4 == 0 && tiles_ % 4 == 0 && reinterpret_cast<uintptr_t>(data_) % 16 == 0) {
    // Vectors of a run are permuted by the vector that the run will be in, so that readers have no bank conflicts.
    constexpr uint32_t kVectors = kTile / 4, kEach = kMost * kVectors / kThreads;
    const auto vector_of = [&](uint32_t run, uint32_t i) { return held + run * kTile + (i ^ run / 4 % 8) * 4; };
    const uint32_t vectors = g.width * kVectors;
    uint32_t* at[kEach];
#pragma unroll
    for (uint32_t u = 0; u < kEach; ++u) {
      const uint32_t v = threadIdx.x + u * kThreads;
      at[u] = g.word(v * 4);
      if (v < vectors) ptx::copy_async16(vector_of(v / kVectors, v % kVectors), at[u], true);
    }
    ptx::copy_async_wait();
    __syncthreads();
#pragma unroll
    for (uint32_t u = 0; u < kEach; ++u) {
      const uint32_t v = threadIdx.x + u * kThreads, r = g.by_width(v * 4), run = v * 4 - r * g.width;
      const uint32_t* word = vector_of(run, r / 4) + r % 4;
      if (v < vectors) {
        *reinterpret_cast<uint4*>(at[u]) = make_uint4(word[0], word[kTile], word[2 * kTile], word[3 * kTile]);
      }
    }
    return;
  }
  for (uint32_t run = warp; run < g.width; run += kWarps) {
    for (uint32_t i = lane; i < count; i += 32) {
      ptx::copy_async4(held + run * kPitch + i, g.word(run * count + i), true);
    }
  }
  ptx::copy_async_wait();
  __syncthreads();
#pragma unroll 4
  for (uint32_t r = warp; r < count; r += kWarps) {
    uint32_t* to = g.data + static_cast<int64_t>(r) * tiles_;
    for (uint32_t run = lane; run < g.width; run += 32) to[run] = held[run * kPitch + r];
  }
}

namespace {

struct OrderArgs {
  ScaleRuns rows, columns;
  uint32_t row_blocks;
};

__global__ void __launch_bounds__(kThreads) order_scales_kernel(const __grid_constant__ OrderArgs p) {
  DIPTYCH_DYNAMIC_SHARED(raw);
  uint32_t* held = reinterpret_cast<uint32_t*>(raw);
  ptx::wait_for_grid_before();
  if (blockIdx.x < p.row_blocks) {
    p.rows.order(blockIdx.x, held);
  } else {
    p.columns.order(blockIdx.x - p.row_blocks, held);
  }
}

}  // namespace

Status order_scales(const ScaleRuns& rows, const ScaleRuns& columns, const Execution& exec) {
  const OrderArgs p{rows, columns, static_cast<uint32_t>(rows.blocks())};
  return launch_after("quantize", order_scales_kernel, rows.blocks() + columns.blocks(), kThreads,
                      std::max(rows.shared_bytes(), columns.shared_bytes()), exec, p);
}

}  // namespace diptych::cuda
