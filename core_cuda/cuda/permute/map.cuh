// permute_map for both kinds of map: a stable counting sort in two launches that overlap. The first counts the rows
// that each chunk of the routing sends to each expert. In the second each block adds up these counts itself, which
// costs less than another launch, and numbers its chunk's rows. Only integer sums have no fixed order.
#pragma once

#include "cuda/base/launch.cuh"
#include "cuda/ptx/grid.cuh"
#include "diptych/format.h"
#include "diptych/permute.h"

namespace diptych::cuda {

constexpr int kTile = 256;           // experts whose counts are stored together, and which one block handles for a mask
constexpr int kPage = 128;           // chunks whose counts lie side by side
constexpr int kPlaceThreads = 1024;  // threads of the second kernel
constexpr int kMapShared = 64 << 10;  // bytes: limit for one block, reached with 2048 experts

// The contract has checked that all counts and entry numbers fit an int.
struct MapParams {
  const void* routing;
  uint32_t* bits;    // mask: [chunks, chunk / 32, stride], a bit for each token
  uint16_t* counts;  // [pages of kPage chunks, tiles * kTile experts, kPage]
  int* row_id_map;
  int* tokens_per_expert;
  int* expert_offsets;
  int* row_source;
  unsigned items, chunk;  // number of tokens (mask) or ids (index), and of those in a chunk
  int chunks, experts, stride, align, rows, tiles;
};

// The range of items of chunk i.
struct Chunk {
  unsigned first, last;

  __device__ __forceinline__ Chunk(const MapParams& p, int i)
      : first(static_cast<unsigned>(i) * p.chunk), last(min(p.items, first + p.chunk)) {}
};

// Returns the address of a page's counts for expert e.
__device__ __forceinline__ uint16_t* counts_of(const MapParams& p, int page, int e) {
  return p.counts + (page * p.tiles * kTile + e) * kPage;
}

// Fills `row_source` with -1 in the first kernel, since the second may not write every row. It uses 32-bit numbers and
// no unrolling, because the time before the first store is not hidden.
__device__ __forceinline__ void fill_source(const MapParams& p) {
  const unsigned step = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x, n = p.rows;
  unsigned done = 0;
  if (reinterpret_cast<uintptr_t>(p.row_source) % 16 == 0) {
    done = n / 4 * 4;
#pragma unroll 1
    for (unsigned i = first; i < n / 4; i += step) reinterpret_cast<int4*>(p.row_source)[i] = make_int4(-1, -1, -1, -1);
  }
#pragma unroll 1
  for (unsigned i = done + first; i < n; i += step) p.row_source[i] = -1;
}

// Returns the size of Experts::groups: one for eight experts, padded so that what follows it is aligned to vectors of
// four.
__host__ __device__ constexpr int group_places(int stride) { return (stride / 8 + 8) / 4 * 4; }

// What a block of the second kernel computes for all experts, in shared memory.
struct Experts {
  int* total;   // [stride] number of entries for the expert
  int* next;    // [stride] row of the first such entry in this block's chunk
  int* offset;  // [stride + 8] start of the expert's region; at [experts]: end of the last region
  int* groups;  // [group_places] rows of eight experts' regions

  __device__ __forceinline__ Experts(void* shared, int stride)
      : total(static_cast<int*>(shared)), next(total + stride), offset(next + stride), groups(offset + stride + 8) {}
  __device__ __forceinline__ unsigned* rest(int stride) const {
    return reinterpret_cast<unsigned*>(groups + group_places(stride));
  }
};
inline size_t experts_bytes(int stride) {
  return (3 * static_cast<size_t>(stride) + 8 + group_places(stride)) * sizeof(int);
}

// Returns a word with 1 in each of the first n bytes, n clamped to 0..4.
__device__ __forceinline__ unsigned ones(int n) { return __funnelshift_rc(0x01010101, 0, 32 - 8 * min(max(n, 0), 4)); }

// Fills `x`; block 0 also writes the outputs by expert. A warp takes eight experts: an expert's counts lie side by
// side, and their sums need neither shared memory nor atomics. Counts past the end of experts or chunks are read but
// not added, because a branch between the loads would serialize them.
template <int kThreads>
__device__ __forceinline__ void place_experts(const MapParams& p, int chunk, const Experts& x) {
  constexpr int kBatch = 8, kWarps = kThreads / 32;  // a warp's experts at once
  static_assert(kTile % kBatch == 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = (p.experts + kBatch - 1) / kBatch;
#pragma unroll 1
  for (int g = warp; g < groups; g += kWarps) {
    unsigned all[kBatch] = {}, before[kBatch] = {};
    int page = 0;
    do {
      const int r0 = page * kPage + lane * 4;
      const uint16_t* at = counts_of(p, page, g * kBatch) + lane * 4;
      uint2 v[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v[b].x), "=r"(v[b].y) : "l"(at + b * kPage) : "memory");
      const unsigned exist = ones(p.chunks - r0), earlier = ones(chunk - r0);
      __syncwarp();  // only for the compiler, which would otherwise use each load before it issues the next
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        all[b] = __dp2a_hi(v[b].y, exist, __dp2a_lo(v[b].x, exist, all[b]));
        before[b] = __dp2a_hi(v[b].y, earlier, __dp2a_lo(v[b].x, earlier, before[b]));
      }
    } while (++page * kPage < p.chunks);
    int total = 0, next = 0;  // values of this lane's expert
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int t = __reduce_add_sync(0xffffffff, all[b]), n = __reduce_add_sync(0xffffffff, before[b]);
      if (lane == b) total = t, next = n;
    }
    const int e = g * kBatch + lane;
    const bool exists = lane < kBatch && e < p.experts;
    const unsigned align = p.align, past = total + align - 1;
    const int region = exists ? past - ((align & (align - 1)) == 0 ? past & (align - 1) : past % align) : 0;
    int upto = region;
#pragma unroll
    for (int d = 1; d < kBatch; d *= 2) {
      const int below = __shfl_up_sync(0xffffffff, upto, d);
      if (lane >= d) upto += below;
    }
    if (exists) x.total[e] = total, x.next[e] = next + upto - region, x.offset[e] = upto - region;
    if (lane == kBatch - 1) x.groups[g] = upto;
  }
  __syncthreads();
#pragma unroll 1
  for (int g = warp; g < groups; g += kWarps) {
    int before = 0;
    for (int i = lane; i < g; i += 32) before += x.groups[i];
    before = __reduce_add_sync(0xffffffff, before);
    const int e = g * kBatch + lane;
    if (lane < kBatch && e < p.experts) x.next[e] += before, x.offset[e] += before;
    if (lane == 0 && g == groups - 1) x.offset[p.experts] = before + x.groups[g];
  }
  __syncthreads();
  if (blockIdx.x != 0) return;
  for (int e = threadIdx.x; e <= p.experts; e += kThreads) {
    p.expert_offsets[e] = min(x.offset[e], p.rows);
    if (e < p.experts) p.tokens_per_expert[e] = max(0, min(x.total[e], p.rows - x.offset[e]));
  }
}

enum class Order { first, second };

// Both kernels prefer all of an SM's L1 as shared memory, so that they agree on its division and can overlap.
template <auto kKernel, Order kOrder>
Status launch_map(int64_t blocks, int threads, size_t shared, const MapParams& p, const Execution& exec) {
  static SharedGrant grant;
  DIPTYCH_TRY(grant.raise(kKernel, exec.device.index, kMapShared, cudaSharedmemCarveoutMaxShared));
  if constexpr (kOrder == Order::first) {
    return launch("permute_map", kKernel, blocks, threads, shared, exec.stream, p);
  } else {
    return launch_after("permute_map", kKernel, blocks, threads, shared, exec, p);
  }
}

Status map_mask(const MapParams&, const Execution&);
Status map_ids(DType id, const MapParams&, const Execution&);

}  // namespace diptych::cuda
