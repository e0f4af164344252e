// Both copies of permuted rows in block formats, from one gather. A thread block takes a tile of 128 x 128 elements
// (geometry: tiles.cuh), or of 64 x 256 for short blocks, and a thread an 8 x 8 patch.
//
// The kernel is limited by L2 traffic: a tile's scales fill only 4 of every 32 bytes of their final memory, and writing
// them there would cost as much as whole sectors. A tile writes them in runs instead (scale_runs.cuh).
#include "cuda/base/launch.cuh"
#include "cuda/quantize/mxfp8.cuh"
#include "cuda/quantize/permuted/patch.cuh"
#include "cuda/quantize/permuted/scale_runs.cuh"
#include "cuda/quantize/tiles.cuh"

namespace diptych::cuda {
namespace {

struct BothArgs {
  SourceArgs in;
  Strips strips;
  uint8_t *row, *col;              // [m, k] and [k, m], E8M0: [m, k]
  ScaleRuns row_scale, col_scale;  // E8M0: col_scale is unused
  DivideRule rule;
  uint8_t* col_codes;    // E8M0: [ceil(m / 32), k], the final codes
  float max_reciprocal;  // E8M0
};

// A thread's tile and the thread's patch in it. Rows and columns are below 2^31; 32-bit indices save registers in a
// kernel that is short of them.
template <int kTileRows, int kTileCols, typename Index>
struct Spot {
  static constexpr int kRows = kTileRows, kCols = kTileCols;
  static_assert(kRows * kCols == kThreads * 64);
  static constexpr unsigned kAcross = kCols / 8, kDown = 32 / kAcross;  // patches across the tile; a warp's patch rows
  unsigned lane, warp, patch_row, patch_col;
  uint32_t tile_m, tile_k;
  Index row0, col0, row, col;
  int rows, cols;  // number of the tile's rows and columns that exist

  __device__ __forceinline__ explicit Spot(const BothArgs& p)
      : lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        patch_row(warp * kDown + lane / kAcross),
        patch_col(lane % kAcross) {
    p.strips.place(blockIdx.x, &tile_m, &tile_k);
    row0 = static_cast<Index>(tile_m) * kRows, col0 = static_cast<Index>(tile_k) * kCols;
    row = row0 + patch_row * 8, col = col0 + patch_col * 8;
    rows = static_cast<int>(min(p.in.m - row0, int64_t{kRows}));
    cols = static_cast<int>(min(p.in.k - col0, int64_t{kCols}));
  }
};
using SquareSpot = Spot<kTile, kTile, uint32_t>;
using WideSpot = Spot<kTile / 2, kTile * 2, int64_t>;

// Gathers the patch; returns whether all elements of the warp exist.
template <typename T, typename At>
__device__ __forceinline__ bool gather(const BothArgs& p, const At& at, Patch<T>& patch) {
  const WarpTokens<At::kDown> tokens(p.in, at.row0 + at.warp * At::kDown * 8, p.in.m);
  const bool whole = tokens.all(p.in) && at.cols == At::kCols;
  if (whole) {
    patch.template gather<true>(p.in, at.col, tokens);
  } else {
    patch.template gather<false>(p.in, at.col, tokens);
  }
  return whole;
}

// Stores eight bytes of row i to `out` [m, k], if the elements exist.
template <bool kWhole, typename At>
__device__ __forceinline__ void store_row(const BothArgs& p, const At& at, uint8_t* out, int i, uint2 bytes) {
  uint8_t* first = out + int64_t{at.row} * p.in.k + at.col;
  if (kWhole || (at.col < p.in.k && at.row + i < p.in.m)) {
    __stcs(reinterpret_cast<uint2*>(row_at(first, i, static_cast<uint32_t>(p.in.k))), bytes);
  }
}

template <typename T, bool kE5M2>
__global__ void __launch_bounds__(kThreads, kPatchBlocks) permuted_both_kernel(const __grid_constant__ BothArgs p) {
  __shared__ __align__(16) uint8_t tile[kTile * kTile];
  __shared__ __align__(16) uint32_t column_max[kWarps * kTile / 2];  // two columns to a word
  __shared__ __align__(16) uint32_t row_max[kTile / 2];
  __shared__ __align__(16) float scales[2 * kTile];  // scales of the columns, then of the rows
  const SquareSpot at(p);
  Patch<T> patch;
  const bool whole = gather(p, at, patch);
  uint32_t w[4];
  const bool nan = patch.column_maxima(w);
#pragma unroll
  for (int j = 0; j < 4; ++j) w[j] = max_abs2<T>(w[j], __shfl_xor_sync(kAllLanes, w[j], 16));
  if (at.lane < 16) {  // maxima over the warp's 16 rows
    *reinterpret_cast<uint4*>(column_max + at.warp * kTile / 2 + at.patch_col * 4) = make_uint4(w[0], w[1], w[2], w[3]);
  }
  patch.row_maxima(nan, w);
  max_and_halve2<T, 2>(w, at.lane, 8), max_and_halve2<T, 1>(w, at.lane, 4);  // rows 2 i and 2 i + 1, i: lane / 4 % 4
  w[0] = max_abs2<T>(w[0], __shfl_xor_sync(kAllLanes, w[0], 2));
  w[0] = max_abs2<T>(w[0], __shfl_xor_sync(kAllLanes, w[0], 1));
  if (at.lane % 4 == 0) row_max[at.patch_row * 4 + at.lane / 4 % 4] = w[0];
  __syncthreads();

  {  // A scale for each thread: columns, then rows
    const int i = threadIdx.x % kTile;
    const bool of_column = threadIdx.x < kTile;
    uint32_t two = of_column ? column_max[i / 2] : row_max[i / 2];
    if (of_column) {
#pragma unroll
      for (int v = 1; v < kWarps; ++v) two = max_abs2<T>(two, column_max[v * kTile / 2 + i / 2]);
    }
    const float scale = scale_from_amax(p.rule, max_abs(0.0f, i % 2 ? upper<T>(two) : lower<T>(two)));
    const uint32_t inverse = bits_of(reciprocal_rn(scale));
    scales[threadIdx.x] = scale;
    if (of_column) {
      if (i < at.cols) *p.col_scale.waiting(at.col0, at.cols, at.tile_m, i) = inverse;
    } else if (i < at.rows) {
      *p.row_scale.waiting(at.row0, at.rows, at.tile_k, i) = inverse;
    }
  }
  __syncthreads();

  uint8_t* turned = tile + unit_offset(at.patch_col * 8, at.patch_row);  // unit_offset of the first column
  const auto encode = [&](auto with_nan, auto all) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float scale = scales[kTile + at.patch_row * 8 + i];
      store_row<all.value>(p, at, p.row, i,
                           encode_patch_row<kE5M2, with_nan.value>(patch.x[i], [&](int) { return scale; }));
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      *reinterpret_cast<uint2*>(turned + j * kTile) =
          patch.template encode_column<kE5M2, with_nan.value>(j, scales[at.patch_col * 8 + j]);
    }
  };
  if (whole && !nan) {
    encode(std::false_type{}, std::true_type{});
  } else {
    encode(std::true_type{}, std::false_type{});
  }
  __syncthreads();
  TileArgs columns{};
  columns.m = p.in.m, columns.col = p.col, columns.vec_col = true;
  store_columns<true>(columns, tile, at.row0, at.col0, p.in.k);
}

// E8M0 with blocks of 32. A warp holds 8 whole rows of its tile, which it writes in pieces of 256 bytes. The columnwise
// copy is not transposed, and four warps hold its blocks of 32 rows. With five blocks on an SM registers would spill.
template <typename T, bool kE5M2>
__global__ void __launch_bounds__(kThreads, 4) permuted_both_mx_kernel(const __grid_constant__ BothArgs p) {
  constexpr int kRows = WideSpot::kRows, kCols = WideSpot::kCols;
  __shared__ __align__(16) uint32_t column_max[kWarps * kCols / 2];
  __shared__ uint32_t row_words[2][kRows];
  const WideSpot at(p);
  Patch<T> patch;
  const bool whole = gather(p, at, patch);
  uint32_t w[4];
  const bool nan = patch.column_maxima(w);
  *reinterpret_cast<uint4*>(column_max + at.warp * kCols / 2 + at.lane * 4) = make_uint4(w[0], w[1], w[2], w[3]);
  patch.row_maxima(nan, w);
  max_and_halve2<T, 2>(w, at.lane, 2), max_and_halve2<T, 1>(w, at.lane, 1);  // rows 2 i and 2 i + 1, i: lane % 4
  const Codes<T> rows(w[0], p.max_reciprocal);
  {  // Four blocks of a row make a word
    uint32_t word[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      word[h] = rows.code[h] << at.lane / 4 % 4 * 8;
      word[h] |= __shfl_xor_sync(kAllLanes, word[h], 4);
      word[h] |= __shfl_xor_sync(kAllLanes, word[h], 8);
    }
    const int second = at.lane / 4 % 2;
    if ((at.lane & 8) == 0) {
      row_words[at.lane / 16][at.patch_row * 8 + at.lane % 4 * 2 + second] = second ? word[1] : word[0];
    }
  }
  __syncthreads();
  if (threadIdx.x < 2 * kRows) {
    const int side = threadIdx.x / kRows, r = threadIdx.x % kRows;
    const int64_t first = at.row0 / kTile * kTile;  // first of the 128 rows that share runs
    const int count = static_cast<int>(min(p.in.m - first, int64_t{kTile}));
    if (r < at.rows && side * kTile < at.cols) {
      *p.row_scale.waiting(first, count, at.tile_k * 2 + side, static_cast<int>(at.row0 - first) + r) =
          row_words[side][r];
    }
  }

  const uint32_t* column = column_max + (at.warp & ~3u) * kCols / 2 + at.lane * 4;
  uint4 most = *reinterpret_cast<const uint4*>(column);
#pragma unroll
  for (int v = 1; v < 4; ++v) {
    const uint4 other = *reinterpret_cast<const uint4*>(column + v * kCols / 2);
    most = make_uint4(max_abs2<T>(most.x, other.x), max_abs2<T>(most.y, other.y), max_abs2<T>(most.z, other.z),
                      max_abs2<T>(most.w, other.w));
  }
  const Codes<T> columns[4] = {
      {most.x, p.max_reciprocal}, {most.y, p.max_reciprocal}, {most.z, p.max_reciprocal}, {most.w, p.max_reciprocal}};
  if (at.warp % 4 == 0 && at.col < p.in.k && at.row < p.in.m) {
    const auto four = [&](int j) {
      return columns[j].code[0] | columns[j].code[1] << 8 | columns[j + 1].code[0] << 16 | columns[j + 1].code[1] << 24;
    };
    *reinterpret_cast<uint2*>(p.col_codes + at.row / kMxBlock * p.in.k + at.col) = make_uint2(four(0), four(2));
  }

  const auto encode = [&](auto with_nan, auto all) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float scale = __shfl_sync(kAllLanes, rows.inverse[i % 2], (at.lane & ~3u) | i / 2);
      store_row<all.value>(p, at, p.row, i,
                           encode_patch_row<kE5M2, with_nan.value>(patch.x[i], [&](int) { return scale; }));
      store_row<all.value>(p, at, p.col, i, encode_patch_row<kE5M2, with_nan.value>(patch.x[i], [&](int j) {
                             return columns[j / 2].inverse[j % 2];
                           }));
    }
  };
  if (whole && !nan) {
    encode(std::false_type{}, std::true_type{});
  } else {
    encode(std::true_type{}, std::false_type{});
  }
}

}  // namespace

bool quantize_permuted_both_fits(const QuantizeArgs& args) {
  const FormatRow& f = row(args.spec.format);
  const bool squares = args.spec.has(kSquare) || args.spec.has(kFromRows);
  if (args.source.kind != SourceKind::permuted || squares || f.block_rows != 1) return false;
  if (!args.rowwise.given() || !args.columnwise.given()) return false;
  const SourceArgs in = source_args(args.x, args.source);
  const void *columns = args.columnwise.data.data, *scales = args.rowwise.scale_inv.data;
  if (!patched(in) || in.m == 0 || in.k == 0 || !aligned(args.rowwise.data.data, 8) || !aligned(scales, 4))
    return false;
  if (f.rule == ScaleRule::e8m0_ceil && f.block_cols == kMxBlock) {
    const bool words = ceil_div(in.k, kMxBlock) % 4 == 0;
    return words && aligned(columns, 8) && aligned(args.columnwise.scale_inv.data, 8);
  }
  return f.rule == ScaleRule::divide && f.scale == DType::f32 && f.block_cols == kTile && aligned(columns, 16) &&
         in.m % 16 == 0;
}

Status quantize_permuted_both(const QuantizeArgs& args, const Execution& exec) {
  const FormatRow& f = row(args.spec.format);
  const bool mx = f.rule == ScaleRule::e8m0_ceil;
  BothArgs p{};
  p.in = source_args(args.x, args.source);
  const int64_t height = mx ? WideSpot::kRows : SquareSpot::kRows, width = mx ? WideSpot::kCols : SquareSpot::kCols;
  const int64_t tiles_m = ceil_div(p.in.m, height), tiles_k = ceil_div(p.in.k, width), tiles = tiles_m * tiles_k;
  p.strips = Strips(p.in, width, tiles_m, tiles_k);
  p.row = args.rowwise.data.as<uint8_t>(), p.col = args.columnwise.data.as<uint8_t>();
  p.rule = divide_rule(args), p.max_reciprocal = 1.0f / row(f.element).max;
  p.row_scale = ScaleRuns(args.rowwise.scale_inv.data, p.in.m, ceil_div(p.in.k, kTile));
  if (mx) {
    p.col_codes = args.columnwise.scale_inv.as<uint8_t>();
  } else {
    p.col_scale = ScaleRuns(args.columnwise.scale_inv.data, p.in.k, tiles_m);
  }
  DIPTYCH_TRY(with_element(f.element, "quantize", [&](auto e5m2) {
    return with_patch_type(p.in, [&](auto type) {
      using T = decltype(type);
      return mx ? launch("quantize", permuted_both_mx_kernel<T, e5m2.value>, tiles, kThreads, 0, exec.stream, p)
                : launch("quantize", permuted_both_kernel<T, e5m2.value>, tiles, kThreads, 0, exec.stream, p);
    });
  }));
  return order_scales(p.row_scale, p.col_scale, exec);
}

}  // namespace diptych::cuda
