// Quantizes a source's values with one scale. Each row of a patch is encoded as soon as it is computed, so that no
// floats are held. The two halves of a gate's gradient are computed from one read and one sigmoid.
#include "cuda/base/launch.cuh"
#include "cuda/quantize/tiles.cuh"

namespace diptych::cuda {
namespace {

constexpr int kBand = 4;  // rows of a patch that are transposed together

template <typename In>
constexpr int kHalves = kTypedGrad<In> ? 2 : 1;

// Encodes a tile of 128 x 128 values, of a gate's gradient one in each half. `tile`: kHalves<In> tiles in shared
// memory; `scratch`: a float for each warp. kUsual: as of Reader, and rows of the copy are aligned to 8 bytes.
template <typename In, bool kE5M2, bool kUsual>
__device__ __forceinline__ void encode_tile(const TileArgs& p, int64_t row0, int64_t col0,
                                            uint8_t (*tile)[kTile * kTile], float* scratch) {
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int halves = kTypedGrad<In> && (kUsual || p.in.gated) ? 2 : 1;
  const int64_t end = halves == 2 ? p.in.f : p.k;  // end of a half's columns
  const int patch_row = warp * 2 + lane / 16, patch_col = lane % 16;
  const int64_t row = row0 + patch_row * 8, col = col0 + patch_col * 8;

  const float scale = p.from.scale ? *p.from.scale : scale_from_amax(p.rule, *p.from.amax);
  if (blockIdx.x == 0 && tid == 0) {
    const float inverse = reciprocal_rn(scale);
    if (p.row_scale) *p.row_scale = inverse;
    if (p.col_scale) *p.col_scale = inverse;
  }

  const Reader<In, true, kUsual> source(p.in, row, col);
  const int left = !p.row ? 0 : kUsual ? 8 : col < end ? static_cast<int>(min(p.m - row, int64_t{8})) : 0;
  uint8_t* out = p.row + row * p.k + col;
  uint2 q[kHalves<In>][kBand];
  float m = 0.0f;
  const auto take = [&](int half, int i, Floats8 y) {
    y = without_inf(y);
    if (p.from.join) {
#pragma unroll
      for (int j = 0; j < 8; ++j) m = max_abs(m, y.v[j]);
    }
    const uint2 bytes = encode_row8<kE5M2>(as_row(y), [&](int) { return scale; });
    if (i < left) {
      if (kUsual || p.vec_row) {
        *reinterpret_cast<uint2*>(out + i * p.k + half * end) = bytes;
      } else {
        store_row8(p.row, p.m, p.k, row + i, col + half * end, false, bytes);
      }
    }
    q[half][i % kBand] = bytes;
  };
  const auto make = [&](int i, const auto& raw) {
    if constexpr (kTypedGrad<In>) {
      Floats8 y[2];
      source.both(raw, y);
      take(0, i, y[0]);
      if (halves == 2) take(1, i, y[1]);
    } else {
      take(0, i, source.values(i, raw));
    }
  };
  const auto turn = [&](int first) {
    if (!p.col) return;
#pragma unroll
    for (int half = 0; half < kHalves<In>; ++half) {
      uint2(&b)[kBand] = q[half];
      transpose4x4(b[0].x, b[1].x, b[2].x, b[3].x), transpose4x4(b[0].y, b[1].y, b[2].y, b[3].y);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        *reinterpret_cast<uint32_t*>(tile[half] + unit_offset(patch_col * 8 + j, patch_row) + first) =
            j < 4 ? b[j].x : b[j - 4].y;
      }
    }
  };
  each_row<8, kBand, kUsual && kTypedNorm<In>>(source, make, turn);
  if (p.from.join) join_amax<kThreads>(m, scratch, p.from.join);
  if (!p.col) return;
  __syncthreads();
  for (int half = 0; half < halves; ++half) {
    store_columns(p, tile[half], row0, col0 + half * end, (half + 1) * end);
  }
}

template <typename In, bool kE5M2>
__global__ void __launch_bounds__(kThreads, In::kKind == SourceKind::activation ? 3 : 2)
    stream_tile_kernel(const __grid_constant__ TileArgs p) {
  __shared__ __align__(16) uint8_t tile[kHalves<In>][kTile * kTile];
  __shared__ float scratch[kWarps];
  const unsigned index = gridDim.x - 1 - blockIdx.x;  // last tiles first: the amax pass has left them in L2
  const int64_t row0 = static_cast<int64_t>(index / p.tiles_k) * kTile;
  const int64_t col0 = static_cast<int64_t>(index % p.tiles_k) * kTile;
  const int64_t end = kTypedGrad<In> && p.in.gated ? p.in.f : p.k;
  if (usual<In>(p.in) && p.vec_row && row0 + kTile <= p.m && col0 + kTile <= end) {
    encode_tile<In, kE5M2, true>(p, row0, col0, tile, scratch);
  } else {
    encode_tile<In, kE5M2, false>(p, row0, col0, tile, scratch);
  }
}

}  // namespace

bool streams(const TileArgs& p) {
  bool typed = false;
  if (p.in.kind == SourceKind::plain || p.m == 0 || p.k == 0) return false;
  (void)with_source<__nv_bfloat16>(p.in, [&](auto type) {
    typed = kTyped<decltype(type)>;
    return Status();
  });
  return typed;
}

Status stream_tiles(const TileArgs& args, DType element, const Execution& exec) {
  TileArgs p = args;
  const bool pairs = p.in.kind == SourceKind::activation_grad && p.in.gated;
  const int64_t tiles_k = ceil_div(pairs ? p.in.f : p.k, kTile), tiles = ceil_div(p.m, kTile) * tiles_k;
  p.tiles_k = static_cast<unsigned>(tiles_k);
  return with_source<__nv_bfloat16>(p.in, [&](auto type) {
    return with_element(element, "quantize", [&](auto e5m2) {
      using In = decltype(type);
      if constexpr (kTyped<In>) {
        return launch("quantize", stream_tile_kernel<In, e5m2.value>, tiles, kThreads, 0, exec.stream, p);
      } else {
        return Status(Code::unsupported, "quantize: not a source of one type");  // `streams` excludes it
      }
    });
  });
}

}  // namespace diptych::cuda
