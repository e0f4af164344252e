// gemm for any pair of formats, any shape and any alignment. Each thread block computes one tile (emulated.cuh).
#include "cuda/gemm/emulated.cuh"

namespace diptych::cuda {
namespace {

struct GemmKernelArgs {
  Operand a, b;  // outer is m for a, n for b
  Epilogue e;
  int tiles_k;
  int tiles_m, tiles_n;
  int period;  // k tiles between two promotions of the partial sums; block scales only
};

template <bool kBlockScales, Layout kA, Layout kB>
__global__ void __launch_bounds__(TileShape<kBlockScales>::kThreads, kBlockScales ? 1 : 2)
    gemm_kernel(const __grid_constant__ GemmKernelArgs p) {
  DIPTYCH_DYNAMIC_SHARED(shared);
  const int2 tile = tile_of_block(blockIdx.x, p.tiles_m, p.tiles_n);
  const TileAt at{tile.x * kTileOuter, tile.y * kTileOuter, 0, p.tiles_k, {}};
  constexpr bool kLean = kA == Layout::either && !kBlockScales;
  product_tile<kBlockScales, kA, kB, false, kLean>(p.a, p.b, p.e, at, p.period, shared);
}

template <bool kBlockScales, Layout kA, Layout kB>
Status run(const GemmKernelArgs& p, const Execution& exec) {
  static SharedGrant grant;
  DIPTYCH_TRY(grant.raise(gemm_kernel<kBlockScales, kA, kB>, exec.device.index, kEmulatedShared));
  return launch("gemm", gemm_kernel<kBlockScales, kA, kB>, static_cast<int64_t>(p.tiles_m) * p.tiles_n,
                TileShape<kBlockScales>::kThreads, kEmulatedShared, exec.stream, p);
}

}  // namespace

Status gemm_emulated(const GemmArgs& args, const Execution& exec) {
  GemmKernelArgs p{};
  const int64_t m = args.d.rows(), n = args.d.cols();
  if (m == 0 || n == 0) return {};
  const bool rows_last = args.a.columnwise && row(args.a.format).columnwise == ColumnwiseLayout::row_major;
  const int64_t k = rows_last ? args.a.data.rows() : args.a.data.cols() * row(args.a.format).pack();
  const int64_t tiles_m = ceil_div(m, kTileOuter), tiles_n = ceil_div(n, kTileOuter), limit = kMostExtent;
  if (m > limit || n > limit || k > limit || tiles_m * tiles_n > limit) {
    return {Code::unsupported, "gemm: no CUDA kernel for D of [" + std::to_string(m) + ", " + std::to_string(n) +
                                   "] and K = " + std::to_string(k) + ": sizes must be at most 2^31 - 256"};
  }
  DIPTYCH_TRY(make_operand("gemm", args.a, m, k, &p.a));
  DIPTYCH_TRY(make_operand("gemm", args.b, n, k, &p.b));
  p.e = make_epilogue(args);
  p.tiles_k = static_cast<int>(ceil_div(k, kTileK));
  p.tiles_m = static_cast<int>(tiles_m), p.tiles_n = static_cast<int>(tiles_n);
  p.period = promotion_period(p.a, p.b);
  if (p.period > 0) return run<true, Layout::either, Layout::either>(p, exec);
  if (!p.a.vec || !p.b.vec) return run<false, Layout::either, Layout::either>(p, exec);
  if (p.a.k_major) {
    return p.b.k_major ? run<false, Layout::k_outer, Layout::k_outer>(p, exec)
                       : run<false, Layout::k_outer, Layout::outer_k>(p, exec);
  }
  return p.b.k_major ? run<false, Layout::outer_k, Layout::k_outer>(p, exec)
                     : run<false, Layout::outer_k, Layout::outer_k>(p, exec);
}

}  // namespace diptych::cuda
