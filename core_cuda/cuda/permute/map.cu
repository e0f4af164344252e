// The map of tokens to experts: a stable counting sort in two launches. The first counts what each chunk of the routing
// sends to each expert; in the second each block adds those counts up itself, which costs less than a launch between
// them, and numbers its chunk's rows. Integer sums alone are taken in no fixed order.
#include "cuda/launch.cuh"
#include "cuda/permute/scan.cuh"
#include "diptych/format.h"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 256;   // experts that a block of the mask kernels handles, four a thread
constexpr int kGroups = 16;  // of threads, at most: each takes tokens of its own
constexpr int kRows = 16;    // tokens that a thread holds at once
constexpr int kManyExperts = 1024;

struct MapParams {
  const void* routing;
  uint16_t* counts;  // [chunks, stride]
  int* row_id_map;
  int* tokens_per_expert;
  int* expert_offsets;
  int* source;
  int64_t items, chunk;  // tokens of a mask or ids, and how many make a chunk
  int chunks, experts, stride, align, rows;
  int tiles, lanes, groups, group_rows;  // mask: lanes threads across a tile, groups along the tokens
  bool vec_in, vec_out;
};

struct Chunking {
  int64_t size, count;
};

// At most 128 chunks, until they would hold more than 16 bits count
Chunking chunking(int64_t items) {
  int64_t size = ceil_div(ceil_div(items, 128), 64) * 64;
  size = size < 64 ? 64 : size > 32768 ? 32768 : size;
  return {size, ceil_div(items, size)};
}

int64_t stride_of(int64_t experts) { return ceil_div(experts, 8) * 8; }

// 1 in each byte of w that is not 0.
__device__ __forceinline__ uint32_t flags_of(uint32_t w) {
  w |= w >> 4;
  w |= w >> 2;
  return (w | w >> 1) & 0x01010101;
}

// Whether token t goes to experts e .. e + 3, a byte each; those past the end: no.
__device__ __forceinline__ uint32_t load_flags(const MapParams& p, int64_t t, int e) {
  const uint8_t* line = static_cast<const uint8_t*>(p.routing) + t * p.experts + e;
  if (p.vec_in) return flags_of(__ldg(reinterpret_cast<const uint32_t*>(line)));
  uint32_t w = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (e + j < p.experts) w |= static_cast<uint32_t>(line[j]) << (8 * j);
  }
  return flags_of(w);
}

__device__ __forceinline__ int byte_of(uint32_t w, int j) { return w >> (8 * j) & 0xff; }

// A thread of the mask kernels: four experts, and which tokens of the block's.
struct MaskPlace {
  int lane, group, expert;
  bool active;

  __device__ __forceinline__ MaskPlace(const MapParams& p, int tile)
      : lane(threadIdx.x % p.lanes),
        group(threadIdx.x / p.lanes),
        expert(tile * kTile + lane * 4),
        active(group < p.groups && expert < p.experts) {}
};

__global__ void __launch_bounds__(kThreads) count_mask_kernel(MapParams p) {
  constexpr int kBatch = 8;
  __shared__ int sums[kTile];
  static_assert(kThreads == kTile);
  const int chunk = blockIdx.x / p.tiles, tile = blockIdx.x % p.tiles;
  const MaskPlace at(p, tile);
  sums[threadIdx.x] = 0;
  __syncthreads();
  if (at.active) {
    const int64_t first = chunk * p.chunk, last = min(p.items, first + p.chunk);
    int n[4] = {};
    for (int64_t t = first + at.group; t < last; t += p.groups * kBatch) {
      uint32_t sum = 0;
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (t + u * p.groups < last) sum += load_flags(p, t + u * p.groups, at.expert);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) n[j] += byte_of(sum, j);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (n[j] != 0) atomicAdd(&sums[at.lane * 4 + j], n[j]);
    }
  }
  __syncthreads();
  const int e = tile * kTile + threadIdx.x;
  if (e < p.stride) p.counts[static_cast<int64_t>(chunk) * p.stride + e] = static_cast<uint16_t>(sums[threadIdx.x]);
}

// The expert that id i names, or -1.
template <typename Id>
__device__ __forceinline__ int load_expert(const MapParams& p, int64_t i) {
  const Id id = __ldg(static_cast<const Id*>(p.routing) + i);
  return id >= 0 && id < p.experts ? static_cast<int>(id) : -1;
}

template <typename Id>
__global__ void __launch_bounds__(kThreads) count_ids_kernel(MapParams p) {
  DIPTYCH_DYNAMIC_SHARED(raw);
  int* sums = reinterpret_cast<int*>(raw);
  for (int e = threadIdx.x; e < p.stride; e += blockDim.x) sums[e] = 0;
  __syncthreads();
  const int64_t first = blockIdx.x * p.chunk, last = min(p.items, first + p.chunk);
#pragma unroll 4
  for (int64_t i = first + threadIdx.x; i < last; i += blockDim.x) {
    const int e = load_expert<Id>(p, i);
    if (e >= 0) atomicAdd(&sums[e], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.stride; e += blockDim.x)
    p.counts[static_cast<int64_t>(blockIdx.x) * p.stride + e] = static_cast<uint16_t>(sums[e]);
}

// What a block of the second launch knows of all experts.
struct Experts {
  int* total;   // [stride] entries that name the expert
  int* next;    // [stride] row of the first such entry in this block's chunk
  int* offset;  // [experts + 1] where its region starts; last: where the last one ends

  __device__ __forceinline__ Experts(void* shared, const MapParams& p)
      : total(static_cast<int*>(shared)), next(total + p.stride), offset(next + p.stride) {}
  __device__ __forceinline__ uint16_t* rest(const MapParams& p) const {
    return reinterpret_cast<uint16_t*>(offset + p.stride + 1);
  }
};
size_t experts_bytes(int stride) { return (3 * static_cast<size_t>(stride) + 1) * sizeof(int); }

__device__ __forceinline__ void add_counts(const MapParams& p, int chunk, const Experts& x) {
  for (int e = threadIdx.x; e < p.stride; e += blockDim.x) x.total[e] = x.next[e] = 0;
  __syncthreads();
  const int columns = p.stride / 8, threads = blockDim.x;
  for (int c0 = 0; c0 < columns; c0 += threads) {
    const int width = min(threads, columns - c0), groups = threads / width;
    const int group = threadIdx.x / width, column = c0 + threadIdx.x % width;
    if (group >= groups) continue;
    int all[8] = {}, before[8] = {};
#pragma unroll 8
    for (int r = group; r < p.chunks; r += groups) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(p.counts + static_cast<int64_t>(r) * p.stride) + column);
      const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int n = j % 2 ? w[j / 2] >> 16 : w[j / 2] & 0xffff;
        all[j] += n;
        before[j] += r < chunk ? n : 0;
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (all[j] != 0) atomicAdd(&x.total[column * 8 + j], all[j]);
      if (before[j] != 0) atomicAdd(&x.next[column * 8 + j], before[j]);
    }
  }
  __syncthreads();
}

// Fills `x`, and this block's part of what does not depend on a chunk: the outputs by expert, and -1 in rows of none.
__device__ __forceinline__ void place_experts(const MapParams& p, int chunk, const Experts& x) {
  add_counts(p, chunk, x);
  const unsigned end = block_scan(
      p.experts, 0x7fffffff,
      [&](int e) { return (static_cast<unsigned>(x.total[e]) + p.align - 1) / p.align * p.align; },
      [&](int e, unsigned at) {
        x.offset[e] = static_cast<int>(at);
        x.next[e] += static_cast<int>(at);
      });
  if (threadIdx.x == 0) x.offset[p.experts] = static_cast<int>(end);
  __syncthreads();
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e <= p.experts; e += blockDim.x) {
      p.expert_offsets[e] = min(x.offset[e], p.rows);
      if (e < p.experts) p.tokens_per_expert[e] = max(0, min(x.total[e], p.rows - x.offset[e]));
    }
  }
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; r < p.rows; r += step) {
    int e = 0, past = p.experts;  // the last region that starts at r or before it is one of these
    while (past - e > 1) {
      const int middle = (e + past) / 2;
      (x.offset[middle] <= r ? e : past) = middle;
    }
    if (r - x.offset[e] >= x.total[e]) p.source[r] = -1;
  }
}

__global__ void __launch_bounds__(kThreads) place_mask_kernel(MapParams p) {
  DIPTYCH_DYNAMIC_SHARED(raw);
  __shared__ uint32_t group_counts[kGroups][kTile / 4];
  const int chunk = blockIdx.x / p.tiles, tile = blockIdx.x % p.tiles;
  const Experts experts(raw, p);
  place_experts(p, chunk, experts);

  const MaskPlace at(p, tile);
  int* next = experts.next + at.expert;
  const int64_t first = chunk * p.chunk, last = min(p.items, first + p.chunk);
  for (int64_t t0 = first; t0 < last; t0 += p.groups * p.group_rows) {
    const int64_t own = t0 + at.group * p.group_rows;
    const int count = at.active ? static_cast<int>(max(int64_t{0}, min(int64_t{p.group_rows}, last - own))) : 0;
    uint32_t flags[kRows], sum = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      flags[i] = i < count ? load_flags(p, own + i, at.expert) : 0;
      sum += flags[i];
    }
    if (at.active) group_counts[at.group][at.lane] = sum;
    __syncthreads();
    int row[4] = {};
    if (at.active) {
#pragma unroll
      for (int j = 0; j < 4; ++j) row[j] = next[j];
      for (int g = 0; g < at.group; ++g) {
        const uint32_t before = group_counts[g][at.lane];
#pragma unroll
        for (int j = 0; j < 4; ++j) row[j] += byte_of(before, j);
      }
    }
    __syncthreads();  // everyone has read what comes before its own
    if (at.active && at.group == p.groups - 1) {
#pragma unroll
      for (int j = 0; j < 4; ++j) next[j] = row[j] + byte_of(sum, j);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i >= count) continue;
      const int64_t entry = (own + i) * p.experts + at.expert;
      int to[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        to[j] = -1;
        if (byte_of(flags[i], j) == 0) continue;
        const int r = row[j]++;
        if (r >= p.rows) continue;
        to[j] = r;
        p.source[r] = static_cast<int>(entry + j);
      }
      if (p.vec_out) {
        *reinterpret_cast<int4*>(p.row_id_map + entry) = make_int4(to[0], to[1], to[2], to[3]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (at.expert + j < p.experts) p.row_id_map[entry + j] = to[j];
        }
      }
    }
  }
}

// Each warp takes a run of ids, 32 at a time: lanes that name one expert find each other, and the first of them counts.
template <typename Id>
__global__ void __launch_bounds__(kThreads) place_ids_kernel(MapParams p) {
  DIPTYCH_DYNAMIC_SHARED(raw);
  const Experts experts(raw, p);
  uint16_t* seen = experts.rest(p);  // [warps, stride]: of each expert, by this warp; then by the warps before it too
  place_experts(p, blockIdx.x, experts);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const unsigned lower = (1u << lane) - 1;
  for (int i = threadIdx.x; i < warps * p.stride; i += blockDim.x) seen[i] = 0;
  __syncthreads();
  const int64_t first = blockIdx.x * p.chunk, last = min(p.items, first + p.chunk);
  const int64_t run = (last - first + warps * 32 - 1) / (warps * 32) * 32;
  const int64_t from = min(last, first + warp * run), to = min(last, from + run);
  uint16_t* mine = seen + warp * p.stride;
  for (int64_t i = from; i < to; i += 32) {
    const int e = i + lane < to ? load_expert<Id>(p, i + lane) : -1;
    const unsigned peers = __match_any_sync(0xffffffff, e);
    if (e >= 0 && (peers & lower) == 0) mine[e] = static_cast<uint16_t>(mine[e] + __popc(peers));
    __syncwarp();
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.stride; e += blockDim.x) {
    uint16_t sum = 0;
    for (int w = 0; w < warps; ++w) {
      const uint16_t n = seen[w * p.stride + e];
      seen[w * p.stride + e] = sum;
      sum = static_cast<uint16_t>(sum + n);
    }
  }
  __syncthreads();
  for (int64_t i = from; i < to; i += 32) {
    const int64_t entry = i + lane;
    const int e = entry < to ? load_expert<Id>(p, entry) : -1;
    const unsigned peers = __match_any_sync(0xffffffff, e);
    int row = e >= 0 ? experts.next[e] + mine[e] + __popc(peers & lower) : -1;
    __syncwarp();
    if (e >= 0 && (peers & lower) == 0) mine[e] = static_cast<uint16_t>(mine[e] + __popc(peers));
    __syncwarp();
    if (row >= p.rows) row = -1;
    if (entry < to) p.row_id_map[entry] = row;
    if (row >= 0) p.source[row] = static_cast<int>(entry);
  }
}

template <typename Id>
Status place_ids(const MapParams& p, const Execution& exec) {
  const int threads = p.experts > kManyExperts ? 128 : kThreads;  // so that each warp's counts fit
  const size_t shared = experts_bytes(p.stride) + static_cast<size_t>(threads / 32) * p.stride * sizeof(uint16_t);
  if (p.chunks > 0) {
    DIPTYCH_TRY(
        launch("permute_map", count_ids_kernel<Id>, p.chunks, kThreads, p.stride * sizeof(int), exec.stream, p));
  }
  return launch("permute_map", place_ids_kernel<Id>, p.chunks > 0 ? p.chunks : 1, threads, shared, exec.stream, p);
}

}  // namespace

int64_t permute_map_workspace_bytes(int64_t items, int64_t experts) {
  return chunking(items).count * stride_of(experts) * static_cast<int64_t>(sizeof(uint16_t));
}

Status permute_map(const PermuteMapArgs& args, const Execution& exec) {
  const bool mask = args.kind == RoutingMap::mask;
  MapParams p{};
  p.routing = args.routing.data, p.counts = args.workspace.as<uint16_t>();
  p.row_id_map = args.row_id_map.as<int>(), p.source = args.source.as<int>();
  p.tokens_per_expert = args.tokens_per_expert.as<int>(), p.expert_offsets = args.expert_offsets.as<int>();
  p.items = mask ? args.routing.rows() : args.routing.numel();
  const Chunking chunks = chunking(p.items);
  p.chunk = chunks.size, p.chunks = static_cast<int>(chunks.count);
  p.experts = static_cast<int>(args.tokens_per_expert.numel()), p.stride = static_cast<int>(stride_of(p.experts));
  p.align = args.align, p.rows = static_cast<int>(args.source.numel());
  if (!mask) return args.routing.dtype == DType::i64 ? place_ids<int64_t>(p, exec) : place_ids<int32_t>(p, exec);

  p.tiles = static_cast<int>(ceil_div(p.experts, kTile));
  p.lanes = p.experts < kTile ? static_cast<int>(ceil_div(p.experts, 4)) : kTile / 4;
  p.groups = kThreads / p.lanes < kGroups ? kThreads / p.lanes : kGroups;
  const int64_t each = ceil_div(p.chunk, p.groups);
  p.group_rows = each < kRows ? static_cast<int>(each) : kRows;
  p.vec_in = p.experts % 4 == 0 && aligned(p.routing, 4);
  p.vec_out = p.experts % 4 == 0 && aligned(p.row_id_map, 16);
  const int64_t blocks = (p.chunks > 0 ? p.chunks : 1) * static_cast<int64_t>(p.tiles);
  if (p.chunks > 0) DIPTYCH_TRY(launch("permute_map", count_mask_kernel, blocks, kThreads, 0, exec.stream, p));
  return launch("permute_map", place_mask_kernel, blocks, kThreads, experts_bytes(p.stride), exec.stream, p);
}

}  // namespace diptych::cuda
