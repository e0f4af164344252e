// grouped_gemm for any pair of formats, any shape and any alignment. It uses the tiles of gemm's emulated kernel, which
// start anew with each group. The launch has as many thread blocks as any offsets can need; those without a tile
// return.
#include "cuda/gemm/emulated.cuh"
#include "cuda/grouped/walk.cuh"

namespace diptych::cuda {
namespace {

struct GroupedKernelArgs {
  Operand a, b;  // rows: b is group 0's; depth: k is R
  Epilogue e;    // depth: D and C are group 0's
  Groups groups;
  int64_t b_data, b_scale, b_amax;  // rows: strides from one group's B to the next, in bytes, bytes and elements
  int tiles_k, tiles_m, tiles_n;    // rows: tiles_m is the most that all groups can have; depth: tiles_k is 0
  int period;
};

// What a thread block multiplies. It lies in shared memory, because the sums need the registers.
struct Work {
  Operand a, b;
  Epilogue e;
  TileAt at;
};

// A range of rows of a tensor.
struct Rows {
  int span;  // numbered as in walk.cuh
  int begin, end;
};

// Returns the rows from tile `number`, counted over all spans, to the end of its span; no rows if there are fewer
// tiles. One warp calls it.
__device__ __forceinline__ Rows find_tile(const Groups& g, int number, int lane) {
  int highest = 0, before = 0;
  for (int base = 0; base < g.count + 2; base += 31) {  // 32 boundaries are 31 spans
    const int begin = boundary(g, base, lane, highest), end = __shfl_down_sync(kAllLanes, begin, 1);
    const int tiles = lane < 31 ? (end - begin + kTileOuter - 1) / kTileOuter : 0;
    const int until = before + running_sum(tiles, lane);
    const unsigned past = __ballot_sync(kAllLanes, until > number);
    if (past != 0) {
      const int at = __ffs(past) - 1, first = __shfl_sync(kAllLanes, until - tiles, at);
      return {base + at, __shfl_sync(kAllLanes, begin, at) + (number - first) * kTileOuter,
              __shfl_sync(kAllLanes, end, at)};
    }
    before = __shfl_sync(kAllLanes, until, 31);
  }
  return {0, 0, 0};
}

// Returns the rows of a group. One warp calls it.
__device__ __forceinline__ Rows find_group(const Groups& g, int group, int lane) {
  int highest = 0;
  for (int i = lane; i <= group; i += 32) highest = max(highest, min(__ldg(g.offsets + i), g.rows));
  const int begin = __reduce_max_sync(kAllLanes, highest);
  return {group + 1, begin, max(begin, min(__ldg(g.offsets + group + 1), g.rows))};
}

__device__ __forceinline__ void move_by(const void*& p, int64_t bytes) {
  p = static_cast<const unsigned char*>(p) + bytes;
}

__device__ __forceinline__ int element_bytes(DType d) { return d == DType::f32 ? 4 : 2; }

// Narrows the kernel's arguments to one tile in w. `here`: the tile's rows; depth: the rows of the group, its range of
// k.
template <bool kDepth>
__device__ __forceinline__ void prepare(const GroupedKernelArgs& p, const Rows& here, int2 tile, int unit, Work& w) {
  const int64_t group = here.span - 1;
  w.a = p.a, w.b = p.b, w.e = p.e;
  w.at = {tile.x * kTileOuter, tile.y * kTileOuter, 0, p.tiles_k, {here.begin, here.end}};
  if constexpr (kDepth) {
    w.at.k0 = here.begin - here.begin % unit;
    w.at.tiles_k = here.begin < here.end ? (here.end - w.at.k0 + kTileK - 1) / kTileK : 0;
    const int64_t bytes = group * p.e.m * p.e.n * element_bytes(p.e.d_type);
    w.e.d = static_cast<unsigned char*>(p.e.d) + bytes;
    move_by(w.e.c, bytes);
  } else {
    w.at.m0 = here.begin;
    w.a.outer = here.end;  // rows of the next group are not read
    w.e.m = here.end;
    if (here.span >= 1 && here.span <= p.groups.count) {
      w.b.data += group * p.b_data;
      move_by(w.b.scale, group * p.b_scale);
      if (p.e.b_amax.at) w.e.b_amax.at += group * p.b_amax;
      if (p.e.bias) move_by(w.e.bias, group * p.e.n * element_bytes(p.e.bias_type));
    } else {
      w.at.tiles_k = 0, w.e.bias = nullptr;
    }
  }
  // An empty sum is +0, whatever alpha and the amaxes are.
  if (w.at.tiles_k == 0) w.e.alpha = 0.0f, w.e.a_amax.at = w.e.b_amax.at = nullptr;
}

template <bool kDepth, bool kBlockScales, Layout kA, Layout kB>
__global__ void __launch_bounds__(TileShape<kBlockScales>::kThreads, kBlockScales ? 1 : 2)
    grouped_kernel(const __grid_constant__ GroupedKernelArgs p) {
  DIPTYCH_DYNAMIC_SHARED(shared);
  __shared__ __align__(16) unsigned char memory[sizeof(Work)];
  Work& work = *reinterpret_cast<Work*>(memory);
  const int in_group = kDepth ? p.tiles_m * p.tiles_n : 0, group = kDepth ? blockIdx.x / in_group : 0;
  if (threadIdx.x < 32) {
    const int2 tile = tile_of_block(blockIdx.x - group * in_group, p.tiles_m, p.tiles_n);
    const Rows here = kDepth ? find_group(p.groups, group, threadIdx.x) : find_tile(p.groups, tile.x, threadIdx.x);
    if (threadIdx.x == 0) prepare<kDepth>(p, here, tile, kBlockScales ? p.period * kTileK : kTileK, work);
  }
  __syncthreads();
  if (work.at.m0 >= work.e.m) return;
  product_tile<kBlockScales, kA, kB, kDepth, true>(work.a, work.b, work.e, work.at, p.period, shared);
}

template <bool kDepth, bool kBlockScales, Layout kA, Layout kB>
Status run(const GroupedKernelArgs& p, const Execution& exec) {
  static SharedGrant grant;
  DIPTYCH_TRY(grant.raise(grouped_kernel<kDepth, kBlockScales, kA, kB>, exec.device.index, kEmulatedShared));
  const int64_t blocks = static_cast<int64_t>(kDepth ? p.groups.count : 1) * p.tiles_m * p.tiles_n;
  return launch("grouped_gemm", grouped_kernel<kDepth, kBlockScales, kA, kB>, blocks, TileShape<kBlockScales>::kThreads,
                kEmulatedShared, exec.stream, p);
}

template <bool kDepth>
Status run(const GroupedKernelArgs& p, const Execution& exec) {
  if (p.period > 0) return run<kDepth, true, Layout::either, Layout::either>(p, exec);
  // The common layouts have kernels of their own. rows: A is rowwise; depth: both copies are columnwise, mostly of one
  // layout.
  if (p.a.vec && p.b.vec) {
    if (!p.a.k_major && !p.b.k_major) return run<kDepth, false, Layout::outer_k, Layout::outer_k>(p, exec);
    constexpr Layout kA = kDepth ? Layout::k_outer : Layout::outer_k;
    if (p.a.k_major == kDepth && p.b.k_major) return run<kDepth, false, kA, Layout::k_outer>(p, exec);
  }
  return run<kDepth, false, Layout::either, Layout::either>(p, exec);
}

}  // namespace

Status grouped_gemm_emulated(const GroupedGemmArgs& args, const Execution& exec) {
  constexpr const char* op = "grouped_gemm";
  const bool depth = args.kind == GroupKind::depth;
  const int64_t groups = args.offsets.numel() - 1;
  GemmArgs first;  // the product of group 0
  first.a = args.a, first.b = depth ? args.b : slice(args.b, 0);
  first.d = depth ? slice(args.d, 0) : args.d, first.c = args.c, first.bias = args.bias;
  first.alpha = args.alpha, first.beta = args.beta;
  const int64_t m = first.d.rows(), n = first.d.cols();
  if (m == 0 || n == 0 || (depth && groups == 0)) return {};
  const bool rows_last = args.a.columnwise && row(args.a.format).columnwise == ColumnwiseLayout::row_major;
  const int64_t k = rows_last ? args.a.data.rows() : args.a.data.cols() * row(args.a.format).pack();
  const int64_t tiles_n = ceil_div(n, kTileOuter);
  const int64_t tiles_m = depth ? ceil_div(m, kTileOuter) : m / kTileOuter + groups + 2;
  const int64_t stacked = depth ? groups : 1;
  if (m > kMostExtent || n > kMostExtent || k > kMostExtent || groups > kMostExtent ||
      tiles_m > kMostExtent / tiles_n || tiles_m * tiles_n > kMostExtent / stacked) {
    return {Code::unsupported, std::string(op) + ": no CUDA kernel for products of [" + std::to_string(m) + ", " +
                                   std::to_string(n) + "] and K = " + std::to_string(k) + " in " +
                                   std::to_string(groups) + " groups: sizes and tiles must be at most 2^31 - 256"};
  }
  GroupedKernelArgs p{};
  DIPTYCH_TRY(make_operand(op, first.a, m, k, &p.a));
  DIPTYCH_TRY(make_operand(op, first.b, n, k, &p.b));
  p.e = make_epilogue(first);
  p.groups = {args.offsets.as<const int32_t>(), static_cast<int>(groups), static_cast<int>(depth ? k : m)};
  p.b_data = first.b.data.numel() * bytes(first.b.data.dtype);
  p.b_scale = first.b.scale_inv.numel() * bytes(first.b.scale_inv.dtype);
  p.b_amax = first.b.amax.given() ? first.b.amax.numel() : 0;
  p.tiles_k = depth ? 0 : static_cast<int>(ceil_div(k, kTileK));
  p.tiles_m = static_cast<int>(tiles_m), p.tiles_n = static_cast<int>(tiles_n);
  p.period = promotion_period(p.a, p.b);
  return depth ? run<true>(p, exec) : run<false>(p, exec);
}

}  // namespace diptych::cuda
