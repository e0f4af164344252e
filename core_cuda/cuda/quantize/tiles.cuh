// Tiles of 128 x 128 elements with float32 scales. A thread block owns a tile, a thread an 8 x 8 patch of it: patch
// column lane % 16, patch row 2 * warp + lane / 16. Rowwise bytes are stored directly, transposed bytes through shared
// memory.
#pragma once

#include "cuda/base/amax.cuh"
#include "cuda/base/vector.cuh"
#include "cuda/quantize/quantize.h"
#include "cuda/source/source.cuh"

namespace diptych::cuda {

constexpr int kTile = 128, kThreads = 256, kWarps = kThreads / 32;

// One scale; 1x128; 128x128; 1x128 with a columnwise copy in 128x128 that is made from the rowwise bytes.
enum class Scaling { tensor, vector, square, from_rows };

struct TileArgs {
  SourceArgs in;
  int64_t m, k;
  unsigned tiles_m, tiles_k;  // thread blocks run along k first
  TensorScale from;           // Scaling::tensor
  uint8_t* row;               // [m, k], or null
  float* row_scale;           // scales of the blocks of `row`, row-major
  uint8_t* col;               // [k, m], or null
  float* col_scale;           // scales of the blocks of `col`, row-major
  DivideRule rule;
  bool vec_row, vec_col;  // the copies and their rows are aligned to 8 and 16 bytes
};

TileArgs tile_args(const QuantizeArgs&);

// Returns the largest m of the thread block to every thread. `scratch`: a float for each warp.
__device__ __forceinline__ float block_max(float m, float* scratch) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, mask));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = m;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) m = fmaxf(m, scratch[w]);
  return m;
}

// Returns the smallest a and the smallest b of the thread block to every thread. `scratch`: two floats for each warp.
__device__ __forceinline__ float2 block_min(float2 m, float2* scratch) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    m.x = fminf(m.x, __shfl_xor_sync(kAllLanes, m.x, mask)), m.y = fminf(m.y, __shfl_xor_sync(kAllLanes, m.y, mask));
  }
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = m;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) m = make_float2(fminf(m.x, scratch[w].x), fminf(m.y, scratch[w].y));
  return m;
}

// The transposed tile in shared memory: 128 columns of 128 bytes. Eight bytes (one patch row) are a unit; unit u of
// column c lies at u ^ (c / 8), so that neither writers (16 columns that are 8 apart) nor readers have bank conflicts.
__device__ __forceinline__ unsigned unit_offset(unsigned column, unsigned unit) {
  return column * kTile + ((unit ^ (column / 8)) * 8);
}

// Stores a tile from shared memory to the columns of p.col from col0 on that lie before `end`. kStream: they are not
// read soon.
template <bool kStream = false>
__device__ __forceinline__ void store_columns(const TileArgs& p, const uint8_t* tile, int64_t row0, int64_t col0,
                                              int64_t end) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (p.vec_col) {
    // Four columns at a time, eight lanes of 16 bytes each; the first eight columns of a warp have an even c / 8.
    const unsigned first = warp * 16 + lane / 8, unit = lane % 8 * 2;
    const int64_t c = col0 + first, r = row0 + unit * 8;
    const uint8_t* from = tile + first * kTile + (unit ^ (warp * 2)) * 8;
    uint8_t* to = p.col + c * p.m + r;
    const int left = r < p.m ? static_cast<int>(min(end - c, int64_t{kTile})) : 0;
#pragma unroll
    for (int i = 0; i < 16; i += 4, to += 4 * p.m) {
      uint4 v = *reinterpret_cast<const uint4*>(from + i * kTile);
      if (i >= 8) v = make_uint4(v.z, v.w, v.x, v.y);
      if (i >= left) continue;
      if constexpr (kStream) {
        __stcs(reinterpret_cast<uint4*>(to), v);
      } else {
        *reinterpret_cast<uint4*>(to) = v;
      }
    }
    return;
  }
  for (unsigned i = 0; i < 16; ++i) {
    const unsigned column = warp * 16 + i;
    if (col0 + column >= end) return;
    for (unsigned b = lane; b < kTile && row0 + b < p.m; b += 32) {
      p.col[(col0 + column) * p.m + row0 + b] = tile[unit_offset(column, b / 8) + b % 8];
    }
  }
}

// stream_tiles quantizes a Typed source with one scale. streams returns whether it takes the arguments.
bool streams(const TileArgs&);
Status stream_tiles(const TileArgs&, DType element, const Execution&);

// permuted_tiles quantizes permuted rows of 16-bit elements. Per tensor: a columnwise copy with or without a rowwise
// one; 1x128: only the columnwise copy; 128x128: any copies. permuted_tiles_fit returns whether it takes the arguments.
bool permuted_tiles_fit(const TileArgs&, Scaling);
Status permuted_tiles(const TileArgs&, Scaling, DType element, const Execution&);

}  // namespace diptych::cuda
