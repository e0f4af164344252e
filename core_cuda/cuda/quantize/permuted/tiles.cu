// Tiles of permuted rows with float32 scales. 1x128: the columnwise copy; per tensor and 128x128: both copies, which
// have the same bytes. Geometry: tiles.cuh.
#include "cuda/base/launch.cuh"
#include "cuda/quantize/permuted/patch.cuh"
#include "cuda/quantize/tiles.cuh"

namespace diptych::cuda {
namespace {

struct PermutedTileArgs {
  TileArgs tile;
  Strips strips;
};

// kTurned: a columnwise copy is wanted.
template <typename T, bool kE5M2, Scaling kScaling, bool kTurned>
__global__ void __launch_bounds__(kThreads, kPatchBlocks)
    permuted_tile_kernel(const __grid_constant__ PermutedTileArgs args) {
  constexpr bool kVector = kScaling == Scaling::vector;
  const TileArgs& p = args.tile;
  __shared__ __align__(16) uint8_t tile[kTurned ? kTile * kTile : 16];
  __shared__ __align__(16) uint32_t maxima[kVector ? kWarps * kTile / 2 : 1];  // maxima of columns, two in a word
  __shared__ __align__(16) float scratch[kVector ? kTile : kWarps];

  const unsigned tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  uint32_t tile_m, tile_k;
  args.strips.place(blockIdx.x, &tile_m, &tile_k);
  const int64_t row0 = static_cast<int64_t>(tile_m) * kTile, col0 = static_cast<int64_t>(tile_k) * kTile;
  const unsigned patch_row = warp * 2 + lane / 16, patch_col = lane % 16;
  const int64_t row = row0 + patch_row * 8, col = col0 + patch_col * 8;

  Patch<T> patch;
  patch.gather(p.in, col, WarpTokens<2>(p.in, row0 + warp * 16, p.m));
  if constexpr (kVector || !kTurned) args.strips.fetch_next(p.in);  // with both copies, writing keeps L2 busy enough
  uint32_t m[4];
  bool nan = patch.column_maxima(m);
  uint8_t* turned = tile + patch_col * 8 * kTile + ((patch_row ^ patch_col) * 8);  // unit_offset of its first column

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
      if (col0 + tid < p.k) p.col_scale[(col0 + tid) * p.tiles_m + tile_m] = reciprocal_rn(scale);
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
    const uint32_t two = max_abs2<T>(max_abs2<T>(m[0], m[1]), max_abs2<T>(m[2], m[3]));
    const float amax = max_abs(max_abs(0.0f, lower<T>(two)), upper<T>(two));
    float scale;
    if constexpr (kScaling == Scaling::square) {
      scale = scale_from_amax(p.rule, block_max(amax, scratch));
      if (tid == 0) {
        const float inverse = reciprocal_rn(scale);
        if (p.row) p.row_scale[static_cast<int64_t>(tile_m) * p.tiles_k + tile_k] = inverse;
        if (p.col) p.col_scale[static_cast<int64_t>(tile_k) * p.tiles_m + tile_m] = inverse;
      }
    } else {
      scale = p.from.scale ? *p.from.scale : scale_from_amax(p.rule, *p.from.amax);
      nan |= !(fabsf(scale) > 0.0f && fabsf(scale) < INFINITY);  // 0 times inf is NaN
      if (blockIdx.x == 0 && tid == 0) {
        const float inverse = reciprocal_rn(scale);
        if (p.row_scale) *p.row_scale = inverse;
        if (p.col_scale) *p.col_scale = inverse;
      }
      if (p.from.join) join_amax<kThreads>(amax, scratch, p.from.join);
    }
    uint2 q[8];
    if (nan) {
      encode_rows<kE5M2, true>(patch, p.row, p.m, p.k, row, col, q, scale);
    } else {
      encode_rows<kE5M2, false>(patch, p.row, p.m, p.k, row, col, q, scale);
    }
    if constexpr (!kTurned) return;
    transpose8x8(q);  // one scale for both copies, so the columnwise bytes are the transposed rowwise bytes
#pragma unroll
    for (int j = 0; j < 8; ++j) *reinterpret_cast<uint2*>(turned + j * kTile) = q[j];
  }
  __syncthreads();
  store_columns<true>(p, tile, row0, col0, p.k);
}

}  // namespace

bool permuted_tiles_fit(const TileArgs& p, Scaling scaling) {
  if (scaling == Scaling::from_rows || !patched(p.in) || p.m == 0 || p.k == 0 || (p.col && !p.vec_col) ||
      (p.row && !p.vec_row))
    return false;
  return scaling == Scaling::square || (p.col && !(p.row && scaling == Scaling::vector));
}

Status permuted_tiles(const TileArgs& tile, Scaling scaling, DType element, const Execution& exec) {
  const PermutedTileArgs p{tile, Strips(tile.in, kTile, tile.tiles_m, tile.tiles_k)};
  const int64_t tiles = static_cast<int64_t>(tile.tiles_m) * tile.tiles_k;
  return with_element(element, "quantize", [&](auto e5m2) {
    return with_patch_type(tile.in, [&](auto type) {
      using T = decltype(type);
      const auto run = [&](auto kernel) { return launch("quantize", kernel, tiles, kThreads, 0, exec.stream, p); };
      return scaling == Scaling::vector   ? run(permuted_tile_kernel<T, e5m2.value, Scaling::vector, true>)
             : scaling == Scaling::tensor ? run(permuted_tile_kernel<T, e5m2.value, Scaling::tensor, true>)
             : p.tile.col                 ? run(permuted_tile_kernel<T, e5m2.value, Scaling::square, true>)
                                          : run(permuted_tile_kernel<T, e5m2.value, Scaling::square, false>);
    });
  });
}

}  // namespace diptych::cuda
