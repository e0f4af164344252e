// Tiles of permuted rows with float32 scales: the columnwise copy, and per tensor with it the rowwise one, whose bytes
// are the same. Geometry: tiles.cuh.
#include "cuda/launch.cuh"
#include "cuda/quantize/patch.cuh"
#include "cuda/quantize/tiles.cuh"

namespace diptych::cuda {
namespace {

constexpr int kWalk = 8;  // tiles of 1x128 that a block walks down: their scales of a column are a sector of memory

struct PermutedTileArgs {
  TileArgs tile;
  Strips strips;  // of blocks
  unsigned walk;  // tiles of a block, at most kWalk; 1x128 alone has more than one
};

// A thread's column's scales of `count` tiles from `tile_m` on.
__device__ __forceinline__ void store_scales(const TileArgs& p, const float (&scales)[kWalk][kTile], int64_t col0,
                                             unsigned tile_m, unsigned count) {
  const int64_t column = col0 + threadIdx.x;
  if (threadIdx.x >= kTile || column >= p.k) return;
  float* to = p.col_scale + column * p.tiles_m + tile_m;
  if (count == kWalk && p.tiles_m % 4 == 0 && reinterpret_cast<uintptr_t>(p.col_scale) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kWalk; i += 4) {
      *reinterpret_cast<float4*>(to + i) = make_float4(scales[i][threadIdx.x], scales[i + 1][threadIdx.x],
                                                       scales[i + 2][threadIdx.x], scales[i + 3][threadIdx.x]);
    }
  } else {
    for (unsigned i = 0; i < count; ++i) to[i] = scales[i][threadIdx.x];
  }
}

template <typename T, bool kE5M2, bool kVector>
__global__ void __launch_bounds__(kThreads, 4) permuted_tile_kernel(const __grid_constant__ PermutedTileArgs args) {
  const TileArgs& p = args.tile;
  __shared__ __align__(16) uint8_t tile[kTile * kTile];
  __shared__ __align__(16) uint32_t tokens[kTile];
  __shared__ __align__(16) uint32_t maxima[kVector ? kWarps * kTile / 2 : 1];  // of columns, two to a word
  __shared__ __align__(16) float scratch[kVector ? kTile : kWarps];
  __shared__ float scales[kVector ? kWalk : 1][kTile];

  const unsigned tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  uint32_t first_m, tile_k;
  args.strips.place(blockIdx.x, &first_m, &tile_k);
  first_m *= kVector ? args.walk : 1;
  const int64_t col0 = static_cast<int64_t>(tile_k) * kTile;
  const unsigned patch_row = warp * 2 + lane / 16, patch_col = lane % 16;
  const int64_t col = col0 + patch_col * 8;
  uint8_t* turned = tile + patch_col * 8 * kTile + ((patch_row ^ patch_col) * 8);  // unit_offset of the first column
  const unsigned count = kVector ? min(args.walk, p.tiles_m - first_m) : 1;

  // Barriers of a tile: `tokens` | gathered, `maxima` | `scratch` | `tile` |. What one reads, the next tile writes two
  // barriers later at the earliest, but for `tokens`: all have gathered when the second one is passed.
  for (unsigned step = 0; step < count; ++step) {
    const int64_t row0 = static_cast<int64_t>(first_m + step) * kTile, row = row0 + patch_row * 8;
    if (tid < kTile) tokens[tid] = row0 + tid < p.m ? p.in.from.at(row0 + tid) : p.in.from.none;
    __syncthreads();
    Patch<T> patch;
    patch.gather(p.in, col, [&](int i) { return tokens[patch_row * 8 + i]; });
    uint32_t m[4];
    bool nan = patch.column_maxima(m);
    if constexpr (kVector) {
#pragma unroll
      for (int j = 0; j < 4; ++j) m[j] = max_abs2<T>(m[j], __shfl_xor_sync(kAllLanes, m[j], 16));
      if (lane < 16) {
        *reinterpret_cast<uint4*>(maxima + warp * kTile / 2 + patch_col * 4) = make_uint4(m[0], m[1], m[2], m[3]);
      }
      __syncthreads();
      if (tid < kTile) {
        uint32_t two = maxima[tid / 2];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) two = max_abs2<T>(two, maxima[w * kTile / 2 + tid / 2]);
        const float scale = scale_from_amax(p.rule, max_abs(0.0f, tid % 2 ? upper<T>(two) : lower<T>(two)));
        scratch[tid] = scale;
        scales[step][tid] = reciprocal_rn(scale);
      }
      __syncthreads();
      const auto turn = [&](auto with_nan) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          *reinterpret_cast<uint2*>(turned + j * kTile) =
              patch.template encode_column<kE5M2, with_nan.value>(j, scratch[patch_col * 8 + j]);
        }
      };
      if (nan) {
        turn(std::true_type{});
      } else {
        turn(std::false_type{});
      }
    } else {
      const float scale = p.from.scale ? *p.from.scale : scale_from_amax(p.rule, *p.from.amax);
      nan |= !(fabsf(scale) > 0.0f && fabsf(scale) < INFINITY);  // 0 times inf
      if (blockIdx.x == 0 && tid == 0) {
        const float inverse = reciprocal_rn(scale);
        if (p.row_scale) *p.row_scale = inverse;
        if (p.col_scale) *p.col_scale = inverse;
      }
      if (p.from.join) {
        const uint32_t two = max_abs2<T>(max_abs2<T>(m[0], m[1]), max_abs2<T>(m[2], m[3]));
        join_amax<kThreads>(max_abs(max_abs(0.0f, lower<T>(two)), upper<T>(two)), scratch, p.from.join);
      }
      uint2 q[8];
      const auto same = [&](int) { return scale; };
      if (nan) {
        encode_rows<kE5M2, true>(patch, p.row, p.m, p.k, row, col, q, same);
      } else {
        encode_rows<kE5M2, false>(patch, p.row, p.m, p.k, row, col, q, same);
      }
      transpose8x8(q);  // one scale for both copies: the same bytes, turned
#pragma unroll
      for (int j = 0; j < 8; ++j) *reinterpret_cast<uint2*>(turned + j * kTile) = q[j];
    }
    __syncthreads();
    store_columns<true>(p, tile, row0, col0, p.k);
  }
  if constexpr (kVector) store_scales(p, scales, col0, first_m, count);
}

}  // namespace

bool permuted_tiles_fit(const TileArgs& p, bool vector) {
  return patched(p.in) && p.col && p.vec_col && (!p.row || (p.vec_row && !vector)) && p.m > 0 && p.k > 0;
}

Status permuted_tiles(const TileArgs& tile, bool vector, DType element, const Execution& exec) {
  // Whole walks, unless that leaves few blocks
  unsigned walk = vector ? kWalk : 1;
  while (walk > 1 && ceil_div(tile.tiles_m, walk) * tile.tiles_k < 1024) walk /= 2;
  const int64_t down = ceil_div(tile.tiles_m, walk), blocks = down * tile.tiles_k;
  const PermutedTileArgs p{tile, Strips(tile.in, kTile, down, tile.tiles_k), walk};
  return with_element(element, "quantize", [&](auto e5m2) {
    return with_patch_type(tile.in, [&](auto type) {
      using T = decltype(type);
      return vector
                 ? launch("quantize", permuted_tile_kernel<T, e5m2.value, true>, blocks, kThreads, 0, exec.stream, p)
                 : launch("quantize", permuted_tile_kernel<T, e5m2.value, false>, blocks, kThreads, 0, exec.stream, p);
    });
  });
}

}  // namespace diptych::cuda
