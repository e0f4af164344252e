// MXFP8: 1x32 blocks rowwise, 32x1 blocks columnwise, E8M0 scales; both copies are row-major and made from one read of
// the input. Square blocks: 32x32 elements share an amax, and its code is stored wherever the 1-D blocks store theirs.
//
// Geometry: mxfp8.cuh.
#include "cuda/base/launch.cuh"
#include "cuda/quantize/many.cuh"
#include "cuda/quantize/mxfp8.cuh"
#include "cuda/source/staged.cuh"

namespace diptych::cuda {
namespace {

// Returns the maximum of a 32 x 32 square; each of its sixteen lanes passes the maxima of two rows or columns.
__device__ __forceinline__ float square_max(float a, float b) {
  float m = fmaxf(a, b);
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {  // bit 2 of a lane tells the two squares apart
    if (mask != 4) m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, mask));
  }
  return m;
}

constexpr int kMxWarps = kMxThreads / 32;

// A thread's patch of a warp's tile.
struct MxPatch {
  int64_t row0, col0, row, col;

  __device__ __forceinline__ MxPatch(int64_t tile_m, int64_t tile_k) : row0(tile_m * kMxRows), col0(tile_k * kMxCols) {
    row = row0 + threadIdx.x % 32 / 8 * 8, col = col0 + threadIdx.x % 8 * 8;
  }
  // Returns whether the tile lies inside the tensor.
  __device__ __forceinline__ bool inside(const MxArgs& p) const {
    return row0 + kMxRows <= p.m && col0 + kMxCols <= p.k;
  }
};

// Encodes a patch x. `whole`: its tile lies inside the tensor; without it stores are tested one by one.
template <bool kE5M2, typename T>
__device__ __forceinline__ void encode_patch(const MxArgs& p, const MxPatch& at, bool whole, Row8<T> (&x)[8]) {
  const int lane = threadIdx.x % 32;
  const auto [row0, col0, row, col] = at;
  if (p.row) {
    float v[8];
    const auto maxima = [&] {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = max_abs(0.0f, x[i]);
      max_and_halve<4>(v, lane, 2), max_and_halve<2>(v, lane, 1);  // four lanes hold a block of 32 columns
    };
    maxima();
    if (rarely(__any_sync(kAllLanes, fmaxf(v[0], v[1]) == INFINITY))) drop_inf(x), maxima();
    if (p.square) v[0] = v[1] = square_max(v[0], v[1]);
    const int64_t mine = row + lane % 4 * 2, block = col / kMxBlock;
    uint32_t code[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      code[h] = e8m0_from_amax(v[h], p.max_reciprocal);
      if (mine + h < p.m && block < p.blocks_k) {
        p.row_scale[(mine + h) * p.blocks_k + block] = static_cast<uint8_t>(code[h]);
      }
    }
    store_rows8<8>(p.row, p.m, p.k, row, col, p.vec_row, whole && p.vec_row, [&](int i) {
      const float s = e8m0_reciprocal(__shfl_sync(kAllLanes, code[i % 2], (lane & ~3) | i / 2));
      return encode_row8<kE5M2>(x[i], [&](int) { return s; });
    });
  }
  if (p.col) {
    float v[8];
    const auto maxima = [&] {
      column_max_abs(x, v);
      max_and_halve<4>(v, lane, 16), max_and_halve<2>(v, lane, 8);  // four patch rows hold a block of 32 rows
    };
    maxima();
    if (rarely(__any_sync(kAllLanes, fmaxf(v[0], v[1]) == INFINITY))) drop_inf(x), maxima();
    if (p.square) v[0] = v[1] = square_max(v[0], v[1]);
    const int64_t mine = col + lane / 8 * 2;
    const bool there[2] = {mine < p.k, mine + 1 < p.k};
    uint32_t code[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      code[h] = e8m0_from_amax(v[h], p.max_reciprocal);
      if (there[h]) p.col_scale[row0 / kMxBlock * p.k + mine + h] = static_cast<uint8_t>(code[h]);
    }
    float s[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      s[j] = e8m0_reciprocal(__shfl_sync(kAllLanes, code[j % 2], (lane & 7) | j / 2 * 8));
    }
    store_rows8<8>(p.col, p.m, p.k, row, col, p.vec_col, whole && p.vec_col,
                   [&](int i) { return encode_row8<kE5M2>(x[i], [&](int j) { return s[j]; }); });
  }
}

// The work of thread block `thread_block` of one tensor.
template <typename In, bool kE5M2>
__device__ __forceinline__ void encode_mxfp8(const MxArgs& p, unsigned thread_block) {
  const unsigned tile = thread_block * kMxWarps + threadIdx.x / 32;
  if (tile >= p.tiles) return;  // whole warps
  const MxPatch at(tile / p.tiles_k, paired_tile<In>(p.in, tile % p.tiles_k, p.tiles_k, kMxCols));
  Row8<Held<In>> x[8];
  fetch_rows<In>(p.in, at.row, at.col, x);
  encode_patch<kE5M2>(p, at, kTyped<In> && at.inside(p), x);
}

// An activation or its gradient: of that, a warp has a tile in each half.
template <typename In, bool kE5M2>
__global__ void __launch_bounds__(kMxThreads, 2)
    staged_kernel(const __grid_constant__ MxArgs p, const __grid_constant__ Shares shares) {
  DIPTYCH_DYNAMIC_SHARED(memory);
  const unsigned wide = kTypedGrad<In> ? p.tiles_k / 2 : p.tiles_k, warp = threadIdx.x / 32;
  each_staged<In, kMxThreads>(
      p.in, memory, shares,
      [&](unsigned block, auto&& f) {
        const unsigned tile = block * kMxWarps + warp;
        const MxPatch at(tile / wide, tile % wide);
        f(at.row, at.col);
      },
      [&](unsigned block, unsigned half, auto& x) {
        const unsigned tile = block * kMxWarps + warp;
        const MxPatch at(tile / wide, tile % wide + half * wide);
        if (at.row0 < p.m) encode_patch<kE5M2>(p, at, at.inside(p), x);
      });
}

template <typename In, bool kE5M2>
__global__ void __launch_bounds__(kMxThreads, kComputed<In> ? 2 : 0) mxfp8_kernel(const __grid_constant__ MxArgs p) {
  encode_mxfp8<In, kE5M2>(p, blockIdx.x);
}

// One of many tensors, without what they share.
struct ManyMx {
  void* x;
  uint8_t *row, *row_scale, *col, *col_scale;
  int64_t m, k;
  unsigned tiles;
  bool vec, vec_row, vec_col;
};

template <typename T, bool kE5M2>
__global__ void __launch_bounds__(kMxThreads)
    mxfp8_many_kernel(const __grid_constant__ Table<ManyMx> many, const float max_reciprocal, const bool square) {
  const int which = tensor_of(many, blockIdx.x);
  const ManyMx& one = many.of[which];
  MxArgs p{};
  p.in.x.data = one.x, p.in.m = p.m = one.m, p.in.k = p.k = one.k, p.in.vec = one.vec;
  p.tiles = one.tiles, p.tiles_k = static_cast<unsigned>((one.k + kMxCols - 1) / kMxCols);
  p.blocks_k = (one.k + kMxBlock - 1) / kMxBlock, p.max_reciprocal = max_reciprocal, p.square = square;
  p.row = one.row, p.row_scale = one.row_scale, p.vec_row = one.vec_row;
  p.col = one.col, p.col_scale = one.col_scale, p.vec_col = one.vec_col;
  encode_mxfp8<T, kE5M2>(p, blockIdx.x - many.first[which]);
}

Status mx_args(const QuantizeArgs& args, MxArgs& p) {
  p.in = source_args(args.x, args.source), p.m = p.in.m, p.k = p.in.k;
  const int64_t tiles_k = ceil_div(p.k, kMxCols), tiles = ceil_div(p.m, kMxRows) * tiles_k;
  if (tiles > 0x7fffffff) return {Code::unsupported, "quantize: the tensor has more than 2^31 tiles of 32 x 64"};
  p.tiles = static_cast<unsigned>(tiles), p.tiles_k = static_cast<unsigned>(tiles_k),
  p.blocks_k = ceil_div(p.k, kMxBlock);
  p.max_reciprocal = 1.0f / row(row(args.spec.format).element).max, p.square = args.spec.has(kSquare);
  if (args.rowwise.given()) {
    p.row = args.rowwise.data.as<uint8_t>(), p.row_scale = args.rowwise.scale_inv.as<uint8_t>();
    p.vec_row = aligned(p.row, 8) && p.k % 8 == 0;
  }
  if (args.columnwise.given()) {
    p.col = args.columnwise.data.as<uint8_t>(), p.col_scale = args.columnwise.scale_inv.as<uint8_t>();
    p.vec_col = aligned(p.col, 8) && p.k % 8 == 0;
  }
  return {};
}

}  // namespace

Status quantize_mxfp8(const QuantizeArgs& args, const Execution& exec) {
  const FormatRow& f = row(args.spec.format);
  MxArgs p{};
  DIPTYCH_TRY(mx_args(args, p));
  if (p.tiles == 0) return {};
  if (permuted_mxfp8_fits(p)) return permuted_mxfp8(p, f.element, exec);
  return with_input_type(p.in, "quantize", [&](auto type) {
    return with_element(f.element, "quantize", [&](auto e5m2) {
      using In = decltype(type);
      if constexpr (kTyped<In> && !kTypedNorm<In>) {
        if (stages<In>(p.in, kMxCols, exec)) {
          return launch_staged<In, staged_kernel<In, e5m2.value>, kMxThreads>(
              "quantize", ceil_div(int64_t{kTypedGrad<In> ? p.tiles / 2 : p.tiles}, kMxWarps), exec, p);
        }
      }
      return launch("quantize", mxfp8_kernel<In, e5m2.value>, ceil_div(int64_t{p.tiles}, kMxWarps), kMxThreads, 0,
                    exec.stream, p);
    });
  });
}

Status mxfp8_many(std::span<const QuantizeArgs> calls, const Execution& exec) {
  MxArgs shared{};
  for (const QuantizeArgs& one : calls) DIPTYCH_TRY(mx_args(one, shared));  // refuses tensors that are too large
  const auto describe = [](const QuantizeArgs& one) {
    MxArgs p{};
    (void)mx_args(one, p);
    return ManyMx{p.in.x.data, p.row,   p.row_scale, p.col,     p.col_scale, p.m,
                  p.k,         p.tiles, p.in.vec,    p.vec_row, p.vec_col};
  };
  return with_float_type(calls.front().x.dtype, "quantize_many", [&](auto type) {
    return with_element(row(calls.front().spec.format).element, "quantize_many", [&](auto e5m2) {
      return launch_many(
          "quantize_many", mxfp8_many_kernel<decltype(type), e5m2.value>, calls, kMxThreads, exec, describe,
          [](const ManyMx& one) { return ceil_div(int64_t{one.tiles}, kMxThreads / 32); }, shared.max_reciprocal,
          shared.square);
    });
  });
}

}  // namespace diptych::cuda
