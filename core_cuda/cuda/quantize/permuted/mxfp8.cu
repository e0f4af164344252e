// The columnwise copy of permuted rows with E8M0 scales. Geometry of tiles: mxfp8.cuh.
#include "cuda/base/launch.cuh"
#include "cuda/quantize/mxfp8.cuh"
#include "cuda/quantize/permuted/patch.cuh"

namespace diptych::cuda {
namespace {

constexpr unsigned kAlong = 2, kDown = kMxThreads / 32 / kAlong;  // tiles of a thread block, along and down the rows

struct PermutedMxArgs {
  MxArgs mx;
  Strips strips;  // the order of thread blocks
};

template <typename T, bool kE5M2>
__global__ void __launch_bounds__(kMxThreads, 4) permuted_mxfp8_kernel(const __grid_constant__ PermutedMxArgs args) {
  const MxArgs& p = args.mx;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t block_m, block_k;
  args.strips.place(blockIdx.x, &block_m, &block_k);
  const int64_t row0 = (static_cast<int64_t>(block_m) * kDown + warp / kAlong) * kMxRows, row = row0 + lane / 8 * 8;
  const int64_t col = (static_cast<int64_t>(block_k) * kAlong + warp % kAlong) * kMxCols + lane % 8 * 8;
  if (row0 >= p.m) return;  // whole warps

  Patch<T> patch;
  patch.gather(p.in, col, WarpTokens<4>(p.in, row0, p.m));
  uint32_t m[4];
  const bool nan = patch.column_maxima(m);
  max_and_halve2<T, 2>(m, lane, 16), max_and_halve2<T, 1>(m, lane, 8);  // maxima over a block's 32 rows
  const Codes<T> mine(m[0], p.max_reciprocal);
  const int64_t first = col + lane / 8 * 2;
  if (col < p.k) {
    uint8_t* to = p.col_scale + row0 / kMxBlock * p.k + first;
    to[0] = static_cast<uint8_t>(mine.code[0]), to[1] = static_cast<uint8_t>(mine.code[1]);
  }
  float scale[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) scale[j] = __shfl_sync(kAllLanes, mine.inverse[j % 2], (lane & 7) | j / 2 * 8);
  const int left = col < p.k ? static_cast<int>(min(p.m - row, int64_t{8})) : 0;
  uint8_t* to = p.col + row * p.k + col;
  const auto store = [&](auto with_nan) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint2 bytes = encode_patch_row<kE5M2, with_nan.value>(patch.x[i], [&](int j) { return scale[j]; });
      uint2* at = reinterpret_cast<uint2*>(row_at(to, i, static_cast<uint32_t>(p.k)));
      if (i < left) __stcs(at, bytes);
    }
  };
  if (nan) {
    store(std::true_type{});
  } else {
    store(std::false_type{});
  }
}

}  // namespace

bool permuted_mxfp8_fits(const MxArgs& p) { return patched(p.in) && !p.square && p.col && p.vec_col && !p.row; }

Status permuted_mxfp8(const MxArgs& mx, DType element, const Execution& exec) {
  const int64_t down = ceil_div(mx.m, kDown * kMxRows), along = ceil_div(mx.k, kAlong * kMxCols);
  const PermutedMxArgs p{mx, Strips(mx.in, kAlong * kMxCols, down, along)};
  return with_patch_type(mx.in, [&](auto type) {
    return with_element(element, "quantize", [&](auto e5m2) {
      return launch("quantize", permuted_mxfp8_kernel<decltype(type), e5m2.value>, down * along, kMxThreads, 0,
                    exec.stream, p);
    });
  });
}

}  // namespace diptych::cuda
