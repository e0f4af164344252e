// MXFP8: 1x32 blocks rowwise, 32x1 columnwise, E8M0 scales, both copies row-major and from one read of the input.
// Square blocks: 32x32 elements share an amax, whose code stands in every place where the 1-D blocks have theirs.
//
// A warp owns 32 rows x 64 columns, a thread an 8 x 8 patch: patch column lane % 8, patch row lane / 8. Every block
// lies inside one warp, so no shared memory and no barrier.
#include "cuda/fused/source.cuh"
#include "cuda/launch.cuh"
#include "cuda/quantize/quantize.h"
#include "cuda/vector.cuh"

namespace diptych::cuda {
namespace {

constexpr int kBlock = 32, kRows = 32, kCols = 64, kThreads = 256;

struct MxArgs {
  SourceArgs in;
  int64_t m, k;
  unsigned tiles, tiles_k;   // warp tiles, and how many of them along k
  int64_t blocks_k;          // ceil(k / 32)
  uint8_t *row, *row_scale;  // [m, k] and [m, ceil(k/32)], or null
  uint8_t *col, *col_scale;  // [m, k] and [ceil(m/32), k], or null
  float max_reciprocal;      // float32(1 / the element's largest value)
  bool square;
  bool vec_row, vec_col;  // aligned to 8 bytes, and so are their rows
};

// The largest of a 32 x 32 square whose sixteen lanes hold the maxima of two rows or columns each.
__device__ __forceinline__ float square_max(float a, float b) {
  float m = fmaxf(a, b);
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {  // bit 2 of a lane tells the two squares apart
    if (mask != 4) m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, mask));
  }
  return m;
}

template <typename In, bool kE5M2>
__global__ void __launch_bounds__(kThreads, kComputed<In> ? 2 : 0) mxfp8_kernel(const __grid_constant__ MxArgs p) {
  const int lane = threadIdx.x % 32;
  const unsigned tile = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (tile >= p.tiles) return;  // whole warps
  const int64_t row0 = static_cast<int64_t>(tile / p.tiles_k) * kRows, row = row0 + lane / 8 * 8;
  const unsigned tile_k = paired_tile<In>(p.in, tile % p.tiles_k, p.tiles_k, kCols);
  const int64_t col = static_cast<int64_t>(tile_k) * kCols + lane % 8 * 8;

  Row8<Held<In>> x[8];
  fetch_rows<In>(p.in, row, col, x);

  if (p.row) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = max_abs(0.0f, x[i]);
    max_and_halve<4>(v, lane, 2), max_and_halve<2>(v, lane, 1);  // four lanes hold a block of 32 columns
    if (p.square) v[0] = v[1] = square_max(v[0], v[1]);
    const int64_t mine = row + lane % 4 * 2, block = col / kBlock;
    uint32_t code[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      code[h] = e8m0_from_amax(v[h], p.max_reciprocal);
      if (mine + h < p.m && block < p.blocks_k) {
        p.row_scale[(mine + h) * p.blocks_k + block] = static_cast<uint8_t>(code[h]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float s = e8m0_reciprocal(__shfl_sync(kAllLanes, code[i % 2], (lane & ~3) | i / 2));
      store_row8(p.row, p.m, p.k, row + i, col, p.vec_row, encode_row8<kE5M2>(x[i], [&](int) { return s; }));
    }
  }
  if (p.col) {
    float v[8];
    column_max_abs(x, v);
    max_and_halve<4>(v, lane, 16), max_and_halve<2>(v, lane, 8);  // four patch rows hold a block of 32 rows
    if (p.square) v[0] = v[1] = square_max(v[0], v[1]);
    const int64_t mine = col + lane / 8 * 2;
    const bool there[2] = {mine < p.k, mine + 1 < p.k};
    uint32_t code[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      code[h] = e8m0_from_amax(v[h], p.max_reciprocal);
      if (there[h]) p.col_scale[row0 / kBlock * p.k + mine + h] = static_cast<uint8_t>(code[h]);
    }
    float s[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      s[j] = e8m0_reciprocal(__shfl_sync(kAllLanes, code[j % 2], (lane & 7) | j / 2 * 8));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      store_row8(p.col, p.m, p.k, row + i, col, p.vec_col, encode_row8<kE5M2>(x[i], [&](int j) { return s[j]; }));
    }
  }
}

}  // namespace

Status quantize_mxfp8(const QuantizeArgs& args, const Execution& exec) {
  const FormatRow& f = row(args.spec.format);
  MxArgs p{};
  p.in = source_args(args.x, args.source), p.m = p.in.m, p.k = p.in.k;
  const int64_t tiles_k = ceil_div(p.k, kCols), tiles = ceil_div(p.m, kRows) * tiles_k;
  if (tiles == 0) return {};
  if (tiles > 0x7fffffff) return {Code::unsupported, "quantize: the tensor has more than 2^31 tiles of 32 x 64"};
  p.tiles = static_cast<unsigned>(tiles), p.tiles_k = static_cast<unsigned>(tiles_k),
  p.blocks_k = ceil_div(p.k, kBlock);
  p.max_reciprocal = 1.0f / row(f.element).max, p.square = args.spec.has(kSquare);
  if (args.rowwise.given()) {
    p.row = args.rowwise.data.as<uint8_t>(), p.row_scale = args.rowwise.scale_inv.as<uint8_t>();
    p.vec_row = aligned(p.row, 8) && p.k % 8 == 0;
  }
  if (args.columnwise.given()) {
    p.col = args.columnwise.data.as<uint8_t>(), p.col_scale = args.columnwise.scale_inv.as<uint8_t>();
    p.vec_col = aligned(p.col, 8) && p.k % 8 == 0;
  }
  return with_input_type(p.in, "quantize", [&](auto type) {
    return with_element(f.element, "quantize", [&](auto e5m2) {
      return launch("quantize", mxfp8_kernel<decltype(type), e5m2.value>, ceil_div(tiles, kThreads / 32), kThreads, 0,
                    exec.stream, p);
    });
  });
}

}  // namespace diptych::cuda
