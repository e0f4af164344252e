#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/permute/origin.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/quantize/scale_runs.cuh"

namespace diptych::cuda {
namespace {

constexpr int kCluster = 8;        // blocks that hold the runs of 128 columns together
constexpr int kPitch = kTile + 1;  // words of a run in shared memory
constexpr int kAhead = 8;          // runs of a warp that are on their way at once
constexpr int64_t kMostRuns = (200 << 10) / (kPitch * 4);

struct OrderArgs {
  ScaleRuns rows, columns;
  int each;                   // runs of columns that a block holds, a multiple of four
  unsigned row_blocks;        // the first ones, whole clusters
  Divider by_row, by_column;  // groups of four runs
};

// What a block orders: runs first .. first + count - 1 of `tiles`, each of `rows` scales. Most parts have `whole` runs.
struct Part {
  uint32_t* data;
  int64_t tiles;
  int rows, first, count, whole;
  Divider by_fours;  // `whole` / 4
};

// `meet` passes when all blocks that share the memory have read their parts.
template <typename Meet>
__device__ __forceinline__ void order(const Part& p, uint32_t* held, Meet&& meet) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t* from = p.data + static_cast<int64_t>(p.first) * p.rows;
  const bool vectors = p.rows == kTile && p.count == p.whole && p.first % 4 == 0 && p.whole % 4 == 0 &&
                       p.tiles % 4 == 0 && reinterpret_cast<uintptr_t>(p.data) % 16 == 0;
  if (vectors) {
    for (int o0 = warp; o0 < p.count; o0 += kWarps * kAhead) {
      uint4 v[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int o = o0 + u * kWarps;
        if (o < p.count) v[u] = *reinterpret_cast<const uint4*>(from + o * kTile + lane * 4);
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int o = o0 + u * kWarps;
        if (o >= p.count) break;
        uint32_t* to = held + o * kPitch + lane * 4;
        to[0] = v[u].x, to[1] = v[u].y, to[2] = v[u].z, to[3] = v[u].w;
      }
    }
  } else {
    for (int o = warp; o < p.count; o += kWarps) {
      for (int i = lane; i < p.rows; i += 32) held[o * kPitch + i] = from[o * p.rows + i];
    }
  }
  meet();
  if (vectors) {
    const unsigned fours = p.count / 4;
#pragma unroll 4
    for (unsigned i = threadIdx.x; i < kTile * fours; i += kThreads) {
      const unsigned r = p.by_fours(i), f = i - r * fours;
      const uint32_t* word = held + f * 4 * kPitch + r;
      *reinterpret_cast<uint4*>(p.data + r * p.tiles + p.first + f * 4) =
          make_uint4(word[0], word[kPitch], word[2 * kPitch], word[3 * kPitch]);
    }
  } else {
    for (int r = warp; r < p.rows; r += kWarps) {
      for (int o = lane; o < p.count; o += 32) p.data[r * p.tiles + p.first + o] = held[o * kPitch + r];
    }
  }
}

__global__ void __launch_bounds__(kThreads) order_scales_kernel(const __grid_constant__ OrderArgs p) {
  DIPTYCH_DYNAMIC_SHARED(raw);
  uint32_t* held = reinterpret_cast<uint32_t*>(raw);
  ptx::wait_for_grid_before();
  if (blockIdx.x < p.row_blocks) {
    const int64_t row0 = static_cast<int64_t>(blockIdx.x) * kTile;
    const int tiles = static_cast<int>(p.rows.tiles), rows = static_cast<int>(min(p.rows.rows - row0, int64_t{kTile}));
    if (rows <= 0) return;
    order({p.rows.data + row0 * tiles, tiles, rows, 0, tiles, tiles, p.by_row}, held, [] { __syncthreads(); });
    return;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const unsigned block = blockIdx.x - p.row_blocks;
  const int64_t col0 = static_cast<int64_t>(block / kCluster) * kTile;
  const int tiles = static_cast<int>(p.columns.tiles), first = min(static_cast<int>(block % kCluster) * p.each, tiles);
  const int cols = static_cast<int>(min(p.columns.rows - col0, int64_t{kTile}));
  order({p.columns.data + col0 * tiles, tiles, cols, first, min(p.each, tiles - first), p.each, p.by_column}, held,
        [] { ptx::cluster_sync(); });
#endif
}

int64_t runs_of_a_block(int64_t tiles) { return ceil_div(ceil_div(tiles, kCluster), 4) * 4; }

}  // namespace

bool scale_runs_fit(int64_t tiles, bool clustered) { return (clustered ? runs_of_a_block(tiles) : tiles) <= kMostRuns; }

Status order_scales(const ScaleRuns& rows, const ScaleRuns& columns, const Execution& exec) {
  static SharedGrant grant;
  DIPTYCH_TRY(grant.raise(order_scales_kernel, exec.device.index, kMostRuns * kPitch * 4));
  const int64_t blocks = ceil_div(rows.rows, kTile);
  OrderArgs p{.rows = rows, .columns = columns};
  p.by_row = Divider(static_cast<uint32_t>(rows.tiles / 4));
  if (!columns.data) {
    p.row_blocks = static_cast<unsigned>(blocks);
    return launch_after("quantize", order_scales_kernel, blocks, kThreads, rows.tiles * kPitch * 4, exec, p);
  }
  const int64_t each = runs_of_a_block(columns.tiles), row_blocks = ceil_div(blocks, kCluster) * kCluster;
  p.each = static_cast<int>(each), p.by_column = Divider(static_cast<uint32_t>(each / 4));
  p.row_blocks = static_cast<unsigned>(row_blocks);
  return launch_clusters_after("quantize", order_scales_kernel, row_blocks + ceil_div(columns.rows, kTile) * kCluster,
                               kCluster, kThreads, std::max(rows.tiles, each) * kPitch * 4, exec, p);
}

}  // namespace diptych::cuda
