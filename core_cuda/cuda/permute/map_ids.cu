// permute_map for a routing of expert ids.
#include "cuda/permute/map.cuh"

namespace diptych::cuda {
namespace {

constexpr int kCountThreads = 512;
constexpr int kManyExperts = 512;  // with more, blocks have fewer threads, so that all warps' counts fit
constexpr int kFewThreads = 256;

// Returns the expert of id i, or -1.
template <typename Id>
__device__ __forceinline__ int load_expert(const MapParams& p, unsigned i) {
  const Id id = __ldg(static_cast<const Id*>(p.routing) + i);
  return id >= 0 && id < p.experts ? static_cast<int>(id) : -1;
}

template <typename Id>
__global__ void __launch_bounds__(kCountThreads) count_ids_kernel(const __grid_constant__ MapParams p) {
  constexpr int kBatch = 2;
  DIPTYCH_DYNAMIC_SHARED(raw);
  int* sums = reinterpret_cast<int*>(raw);
  ptx::let_next_grid_start();
  const Chunk chunk(p, blockIdx.x);
  int e[kBatch];
  auto load = [&](unsigned i0) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const unsigned i = i0 + threadIdx.x + b * kCountThreads;
      e[b] = i < chunk.last ? load_expert<Id>(p, i) : -1;
    }
  };
  load(chunk.first);
  fill_source(p);
  for (int i = threadIdx.x; i < p.experts; i += kCountThreads) sums[i] = 0;
  __syncthreads();
  for (unsigned i0 = chunk.first; i0 < chunk.last; i0 += kCountThreads * kBatch) {
    if (i0 != chunk.first) load(i0);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (e[b] >= 0) atomicAdd(&sums[e[b]], 1);
    }
  }
  if (chunk.first >= chunk.last) return;  // without ids there are no counts
  __syncthreads();
  for (int i = threadIdx.x; i < p.experts; i += kCountThreads)
    counts_of(p, blockIdx.x / kPage, i)[blockIdx.x % kPage] = static_cast<uint16_t>(sums[i]);
}

// One thread takes one id. Lanes with the same expert find each other; a table gives the number of its ids in earlier
// warps. This needs no other chunk's counts and is done before the first kernel has ended.
template <typename Id, int kThreads>
__global__ void __launch_bounds__(kThreads, 1) place_ids_kernel(const __grid_constant__ MapParams p) {
  DIPTYCH_DYNAMIC_SHARED(raw);
  constexpr int kWarps = kThreads / 32;
  ptx::let_next_grid_start();
  const Experts experts(raw, p.stride);
  const int pairs = p.stride / 2;
  unsigned* table =
      experts.rest(p.stride);  // [kWarps, pairs] 16 bits an expert: its ids in this warp, then in earlier warps
  unsigned* sums = table + kWarps * pairs;  // [pairs] its ids in all warps
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint16_t* mine = reinterpret_cast<uint16_t*>(table + warp * pairs);
  const Chunk chunk(p, blockIdx.x);
  int e, rank;  // rank: how many of the ids before this one, among those taken at once, are expert e
  auto rank_ids = [&](unsigned i0) {
    e = i0 + threadIdx.x < chunk.last ? load_expert<Id>(p, i0 + threadIdx.x) : -1;
    for (int c = threadIdx.x; c < kWarps * pairs / 4; c += kThreads)
      reinterpret_cast<uint4*>(table)[c] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    const unsigned peers = __match_any_sync(0xffffffff, e);
    rank = __popc(peers & ((1u << lane) - 1));
    if (e >= 0 && rank == 0) mine[e] = static_cast<uint16_t>(__popc(peers));
    __syncthreads();
    for (int c = threadIdx.x; c < pairs; c += kThreads) {
      unsigned sum = 0;
#pragma unroll 8
      for (int w = 0; w < kWarps; ++w) {
        const unsigned n = table[w * pairs + c];
        table[w * pairs + c] = sum;
        sum += n;  // at most kThreads in each half
      }
      sums[c] = sum;
    }
    __syncthreads();
    if (e >= 0) rank += mine[e];
  };
  rank_ids(chunk.first);
  ptx::wait_for_grid_before();
  place_experts<kThreads>(p, blockIdx.x, experts);
  for (unsigned i0 = chunk.first; i0 < chunk.last; i0 += kThreads) {
    if (i0 != chunk.first) {
      for (int c = threadIdx.x; c < p.experts; c += kThreads) experts.next[c] += reinterpret_cast<uint16_t*>(sums)[c];
      __syncthreads();
      rank_ids(i0);
    }
    const unsigned entry = i0 + threadIdx.x;
    int row = e >= 0 ? experts.next[e] + rank : -1;
    if (row >= p.rows) row = -1;
    if (entry < chunk.last) p.row_id_map[entry] = row;
    if (row >= 0) p.row_source[row] = static_cast<int>(entry);
    __syncthreads();
  }
}

template <typename Id, int kThreads>
Status place_ids(int64_t blocks, const MapParams& p, const Execution& exec) {
  const size_t shared =
      experts_bytes(p.stride) + (kThreads / 32 + 1) * static_cast<size_t>(p.stride) * sizeof(uint16_t);
  return launch_map<place_ids_kernel<Id, kThreads>, Order::second>(blocks, kThreads, shared, p, exec);
}

template <typename Id>
Status map_ids_of(const MapParams& p, const Execution& exec) {
  const int64_t blocks = p.chunks > 0 ? p.chunks : 1;
  DIPTYCH_TRY((launch_map<count_ids_kernel<Id>, Order::first>(blocks, kCountThreads, p.stride * sizeof(int), p, exec)));
  return p.experts > kManyExperts ? place_ids<Id, kFewThreads>(blocks, p, exec)
                                  : place_ids<Id, kPlaceThreads>(blocks, p, exec);
}

}  // namespace

Status map_ids(DType id, const MapParams& p, const Execution& exec) {
  return id == DType::i64 ? map_ids_of<int64_t>(p, exec) : map_ids_of<int32_t>(p, exec);
}

}  // namespace diptych::cuda
