// The map of tokens to experts: a stable counting sort in two launches that overlap. The first counts what each chunk
// of the routing sends to each expert; in the second each block adds those counts up itself, which costs less than a
// launch between them, and numbers its chunk's rows. Integer sums alone are taken in no fixed order.
#include "cuda/launch.cuh"
#include "cuda/permute/scan.cuh"
#include "cuda/ptx/grid.cuh"
#include "diptych/format.h"

namespace diptych::cuda {
namespace {

constexpr int kTile = 256;           // experts that a block of the mask kernels handles
constexpr int kWords = 4;            // of 32 tokens: what such a block takes at once
constexpr int kMaskThreads = 1024;   // of those kernels, at most
constexpr int kCountThreads = 512;   // of the first kernel for ids
constexpr int kPlaceThreads = 1024;  // of the second one
constexpr int kManyExperts = 512;    // more than these: fewer threads, so that each warp's counts fit
constexpr int kFewThreads = 256;
constexpr int kMaxShared = 64 << 10;  // of one block, with 2048 experts

struct MapParams {
  const void* routing;
  uint32_t* bits;    // mask: [chunks, chunk / 32, stride], a bit for each token
  uint16_t* counts;  // [experts, chunk_stride]
  int* row_id_map;
  int* tokens_per_expert;
  int* expert_offsets;
  int* source;
  int64_t items, chunk;  // tokens of a mask or ids, and how many make a chunk
  int chunks, chunk_stride, experts, stride, align, rows;
  int tiles, lanes, octets;  // mask: threads across a tile, and how many times eight tokens they take at once
};

int64_t round_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }
int64_t stride_of(int64_t experts) { return round_up(experts, 8); }

struct Chunking {
  int64_t size, count, stride;  // stride: of an expert's counts, whole vectors of four

  // At most 128 chunks, until they would hold more than 16 bits count
  Chunking(int64_t items, bool mask) {
    const int64_t unit = mask ? 32 : 64, even = round_up(ceil_div(items, 128), unit);
    size = even < unit ? unit : even > 32768 ? 32768 : even;
    count = ceil_div(items, size), stride = round_up(count, 4);
  }
  int64_t bits(int64_t experts) const { return count * (size / 32) * stride_of(experts); }  // words
  int64_t counts(int64_t experts) const { return experts * stride; }
};

__device__ __forceinline__ int64_t chunk_end(const MapParams& p, int64_t first) {
  return min(p.items, first + p.chunk);
}

// 1 in each byte of w that is not 0.
__device__ __forceinline__ uint32_t flags_of(uint32_t w) {
  w |= w >> 4;
  w |= w >> 2;
  return (w | w >> 1) & 0x01010101;
}

// What token t's line of the mask says of experts e .. e + 3, a byte each; those past the end: no.
template <bool kVec>
__device__ __forceinline__ uint32_t load_mask(const MapParams& p, int64_t t, int e) {
  const uint8_t* line = static_cast<const uint8_t*>(p.routing) + t * p.experts + e;
  if constexpr (kVec) return __ldg(reinterpret_cast<const uint32_t*>(line));
  uint32_t w = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (e + j < p.experts) w |= static_cast<uint32_t>(line[j]) << (8 * j);
  }
  return w;
}

// The first kernel writes -1 wherever the second may have nothing to put, which then writes what exists and no more:
// these stores wait for nothing, while the second kernel's come last. The grid takes n entries.
__device__ __forceinline__ void fill_absent(int* out, int64_t n) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  int64_t done = 0;
  if (reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    done = n / 4 * 4;
    for (int64_t i = first; i < n / 4; i += step) reinterpret_cast<int4*>(out)[i] = make_int4(-1, -1, -1, -1);
  }
  for (int64_t i = done + first; i < n; i += step) out[i] = -1;
}

// Turns a chunk's part of the mask on its side, 32 tokens of one expert a word, and counts them.
template <bool kVec>
__global__ void __launch_bounds__(kMaskThreads, 1) count_mask_kernel(const __grid_constant__ MapParams p) {
  __shared__ __align__(16) uint8_t turned[kWords][kTile][4];
  ptx::let_next_grid_start();
  const int chunk = blockIdx.x / p.tiles, tile = blockIdx.x % p.tiles;
  const int lane = threadIdx.x % p.lanes, octet = threadIdx.x / p.lanes;
  const int first_expert = tile * kTile, width = min(kTile, p.experts - first_expert);
  const int expert = first_expert + lane * 4, column = threadIdx.x;
  const bool active = octet < p.octets && expert < p.experts;
  const int64_t first = chunk * p.chunk, last = chunk_end(p, first), chunk_words = p.chunk / 32;
  int n = 0;  // of expert first_expert + column
  for (int64_t t0 = first; t0 < last; t0 += p.octets * 8) {
    const int64_t own = t0 + octet * 8;
    uint32_t w[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = active && own + i < last ? load_mask<kVec>(p, own + i, expert) : 0;
    if (t0 == first) {  // while the loads are on their way
      fill_absent(p.source, p.rows);
      fill_absent(p.row_id_map, p.items * p.experts);
    }
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum |= flags_of(w[i]) << i;
    __syncthreads();  // the last pass has been read
    if (octet < p.octets) {
#pragma unroll
      for (int j = 0; j < 4; ++j) turned[octet / 4][lane * 4 + j][octet % 4] = static_cast<uint8_t>(sum >> (8 * j));
    }
    __syncthreads();
    if (column < width) {
      for (int q = 0; q < p.octets / 4; ++q) {
        const int64_t word = (t0 - first) / 32 + q;
        if (word >= chunk_words) break;
        const uint32_t v = *reinterpret_cast<const uint32_t*>(turned[q][column]);
        n += __popc(v);
        p.bits[(chunk * chunk_words + word) * p.stride + first_expert + column] = v;
      }
    }
  }
  if (first >= last) {  // no tokens, hence no counts
    fill_absent(p.source, p.rows);
  } else if (column < width) {
    p.counts[static_cast<int64_t>(first_expert + column) * p.chunk_stride + chunk] = static_cast<uint16_t>(n);
  }
}

// The expert that id i names, or -1.
template <typename Id>
__device__ __forceinline__ int load_expert(const MapParams& p, int64_t i) {
  const Id id = __ldg(static_cast<const Id*>(p.routing) + i);
  return id >= 0 && id < p.experts ? static_cast<int>(id) : -1;
}

template <typename Id>
__global__ void __launch_bounds__(kCountThreads) count_ids_kernel(const __grid_constant__ MapParams p) {
  constexpr int kBatch = 2;
  DIPTYCH_DYNAMIC_SHARED(raw);
  int* sums = reinterpret_cast<int*>(raw);
  ptx::let_next_grid_start();
  const int64_t first = blockIdx.x * p.chunk, last = chunk_end(p, first);
  int e[kBatch];
  auto load = [&](int64_t i0) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t i = i0 + threadIdx.x + b * kCountThreads;
      e[b] = i < last ? load_expert<Id>(p, i) : -1;
    }
  };
  load(first);
  fill_absent(p.source, p.rows);
  for (int i = threadIdx.x; i < p.experts; i += kCountThreads) sums[i] = 0;
  __syncthreads();
  for (int64_t i0 = first; i0 < last; i0 += kCountThreads * kBatch) {
    if (i0 != first) load(i0);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (e[b] >= 0) atomicAdd(&sums[e[b]], 1);
    }
  }
  if (first >= last) return;  // no ids, hence no counts
  __syncthreads();
  for (int i = threadIdx.x; i < p.experts; i += kCountThreads)
    p.counts[static_cast<int64_t>(i) * p.chunk_stride + blockIdx.x] = static_cast<uint16_t>(sums[i]);
}

// What a block of the second kernel knows of all experts.
struct Experts {
  int* total;   // [stride] entries that name the expert
  int* next;    // [stride] row of the first such entry in this block's chunk
  int* offset;  // [stride + 4] where its region starts; [experts]: where the last one ends

  __device__ __forceinline__ Experts(void* shared, int stride)
      : total(static_cast<int*>(shared)), next(total + stride), offset(next + stride) {}
  __device__ __forceinline__ unsigned* rest(int stride) const {
    return reinterpret_cast<unsigned*>(offset + stride + 4);
  }
};
size_t experts_bytes(int stride) { return (3 * static_cast<size_t>(stride) + 4) * sizeof(int); }

// A warp for each expert: its counts lie side by side, and their sums need neither shared memory nor atomics.
template <int kThreads>
__device__ __forceinline__ void add_counts(const MapParams& p, int chunk, const Experts& x) {
  constexpr int kBatch = 8, kWarps = kThreads / 32;  // a warp's experts at once
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int e0 = 0; e0 < p.experts; e0 += kWarps * kBatch) {
    unsigned all[kBatch] = {}, before[kBatch] = {};
#pragma unroll 1
    for (int from = 0; from < p.chunk_stride; from += 128) {
      const int r0 = from + lane * 4;
      uint2 v[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        // What lies past the end counts 0 times below: a branch between the loads would have each wait for the last
        const unsigned e = min(e0 + warp + b * kWarps, p.experts - 1);
        const uint16_t* at = p.counts + (e * static_cast<unsigned>(p.chunk_stride) + min(r0, p.chunk_stride - 4));
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v[b].x), "=r"(v[b].y) : "l"(at) : "memory");
      }
      __syncthreads();  // orders nothing: without it the compiler uses each load before it asks for the next
      unsigned exist = 0, earlier = 0;  // a byte for each of the four chunks: how often its count counts
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        exist |= r0 + j < p.chunks ? 1u << (8 * j) : 0;
        earlier |= r0 + j < chunk ? 1u << (8 * j) : 0;
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        all[b] = __dp2a_hi(v[b].y, exist, __dp2a_lo(v[b].x, exist, all[b]));
        before[b] = __dp2a_hi(v[b].y, earlier, __dp2a_lo(v[b].x, earlier, before[b]));
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int e = e0 + warp + b * kWarps;
      if (e >= p.experts) break;
      const unsigned total = __reduce_add_sync(0xffffffff, all[b]), next = __reduce_add_sync(0xffffffff, before[b]);
      if (lane == 0) x.total[e] = static_cast<int>(total), x.next[e] = static_cast<int>(next);
    }
  }
  __syncthreads();
}

// Fills `x`; block 0 writes the outputs by expert.
template <int kThreads>
__device__ __forceinline__ void place_experts(const MapParams& p, int chunk, const Experts& x) {
  add_counts<kThreads>(p, chunk, x);
  const unsigned end = block_scan(
      p.experts, 0x7fffffff,
      [&](int e) { return (static_cast<unsigned>(x.total[e]) + p.align - 1) / p.align * p.align; },
      [&](int e, unsigned at) {
        x.offset[e] = static_cast<int>(at);
        x.next[e] += static_cast<int>(at);
      });
  if (blockIdx.x != 0) return;
  if (threadIdx.x == 0) x.offset[p.experts] = static_cast<int>(end);
  __syncthreads();
  for (int e = threadIdx.x; e <= p.experts; e += kThreads) {
    p.expert_offsets[e] = min(x.offset[e], p.rows);
    if (e < p.experts) p.tokens_per_expert[e] = max(0, min(x.total[e], p.rows - x.offset[e]));
  }
}

// A thread for each expert and 32 tokens walks through the bits that are set.
__global__ void __launch_bounds__(kMaskThreads, 1) place_mask_kernel(const __grid_constant__ MapParams p) {
  DIPTYCH_DYNAMIC_SHARED(raw);
  __shared__ uint32_t words[kWords][kTile];
  static_assert(kWords * kTile == kMaskThreads);
  ptx::let_next_grid_start();
  const int chunk = blockIdx.x / p.tiles, tile = blockIdx.x % p.tiles;
  const int first_expert = tile * kTile, width = min(kTile, p.experts - first_expert);
  const int e = threadIdx.x % kTile, q = threadIdx.x / kTile;
  const int64_t first = chunk * p.chunk, last = chunk_end(p, first), chunk_words = p.chunk / 32;
  const int64_t used_words = first < last ? (last - first + 31) / 32 : 0;
  const Experts experts(raw, p.stride);
  ptx::wait_for_grid_before();

  auto load = [&](int64_t w0) {
    return e < width && w0 + q < used_words ? p.bits[(chunk * chunk_words + w0 + q) * p.stride + first_expert + e] : 0;
  };
  uint32_t own = load(0);
  place_experts<kMaskThreads>(p, chunk, experts);
  int* next = experts.next + first_expert;
  for (int64_t w0 = 0; w0 < used_words; w0 += kWords) {
    if (w0 != 0) own = load(w0);
    words[q][e] = own;
    __syncthreads();
    if (own != 0) {
      int row = next[e];
#pragma unroll
      for (int b = 0; b < kWords - 1; ++b) row += b < q ? __popc(words[b][e]) : 0;
      for (uint32_t v = own; v != 0 && row < p.rows; v &= v - 1, ++row) {
        const int64_t entry = (first + (w0 + q) * 32 + __ffs(v) - 1) * p.experts + first_expert + e;
        p.source[row] = static_cast<int>(entry);
        p.row_id_map[entry] = row;
      }
    }
    __syncthreads();
    if (q == 0 && e < width) {
      int n = 0;
#pragma unroll
      for (int b = 0; b < kWords; ++b) n += __popc(words[b][e]);
      next[e] += n;
    }
    __syncthreads();
  }
}

// A thread for each id. Lanes that name one expert find each other; what the warps before them saw of it comes from a
// table. That needs no other chunk's counts and is done before the first kernel has ended.
template <typename Id, int kThreads>
__global__ void __launch_bounds__(kThreads, 1) place_ids_kernel(const __grid_constant__ MapParams p) {
  DIPTYCH_DYNAMIC_SHARED(raw);
  constexpr int kWarps = kThreads / 32;
  ptx::let_next_grid_start();
  const Experts experts(raw, p.stride);
  const int pairs = p.stride / 2;
  unsigned* table =
      experts.rest(p.stride);  // [kWarps, pairs] 16 bits an expert: seen by this warp; then by those before
  unsigned* sums = table + kWarps * pairs;  // [pairs] by all of them
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint16_t* mine = reinterpret_cast<uint16_t*>(table + warp * pairs);
  const int64_t first = blockIdx.x * p.chunk, last = chunk_end(p, first);
  int e, rank;  // rank: how many ids before this one, of those that are taken at once, name expert e
  auto rank_ids = [&](int64_t i0) {
    e = i0 + threadIdx.x < last ? load_expert<Id>(p, i0 + threadIdx.x) : -1;
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
  rank_ids(first);
  ptx::wait_for_grid_before();
  place_experts<kThreads>(p, blockIdx.x, experts);
  for (int64_t i0 = first; i0 < last; i0 += kThreads) {
    if (i0 != first) {
      for (int c = threadIdx.x; c < p.experts; c += kThreads) experts.next[c] += reinterpret_cast<uint16_t*>(sums)[c];
      __syncthreads();
      rank_ids(i0);
    }
    const int64_t entry = i0 + threadIdx.x;
    int row = e >= 0 ? experts.next[e] + rank : -1;
    if (row >= p.rows) row = -1;
    if (entry < last) p.row_id_map[entry] = row;
    if (row >= 0) p.source[row] = static_cast<int>(entry);
    __syncthreads();
  }
}

enum class Order { first, second };

// All of an SM's shared memory, so that both kernels want the same division of it.
template <auto kKernel, Order kOrder>
Status launch_map(int64_t blocks, int threads, size_t shared, const MapParams& p, const Execution& exec) {
  static SharedGrant grant;
  DIPTYCH_TRY(grant.raise(kKernel, exec.device.index, kMaxShared, cudaSharedmemCarveoutMaxShared));
  if constexpr (kOrder == Order::first) {
    return launch("permute_map", kKernel, blocks, threads, shared, exec.stream, p);
  } else {
    return launch_after("permute_map", kKernel, blocks, threads, shared, exec, p);
  }
}

template <typename Id, int kThreads>
Status place_ids(int64_t blocks, const MapParams& p, const Execution& exec) {
  const size_t shared =
      experts_bytes(p.stride) + (kThreads / 32 + 1) * static_cast<size_t>(p.stride) * sizeof(uint16_t);
  return launch_map<place_ids_kernel<Id, kThreads>, Order::second>(blocks, kThreads, shared, p, exec);
}

template <typename Id>
Status map_ids(int64_t blocks, const MapParams& p, const Execution& exec) {
  DIPTYCH_TRY((launch_map<count_ids_kernel<Id>, Order::first>(blocks, kCountThreads, p.stride * sizeof(int), p, exec)));
  return p.experts > kManyExperts ? place_ids<Id, kFewThreads>(blocks, p, exec)
                                  : place_ids<Id, kPlaceThreads>(blocks, p, exec);
}

Status map_mask(int64_t chunks, MapParams& p, const Execution& exec) {
  p.tiles = static_cast<int>(ceil_div(p.experts, kTile));
  p.lanes = p.experts < kTile ? static_cast<int>(ceil_div(p.experts, 4)) : kTile / 4;
  p.octets = static_cast<int>(p.chunk < kWords * 32 ? p.chunk / 8 : kWords * 4);
  const int threads = static_cast<int>(round_up(p.lanes * p.octets, 32));
  const int64_t blocks = chunks * p.tiles;
  const bool vec = p.experts % 4 == 0 && aligned(p.routing, 4);
  DIPTYCH_TRY((vec ? launch_map<count_mask_kernel<true>, Order::first>(blocks, threads, 0, p, exec)
                   : launch_map<count_mask_kernel<false>, Order::first>(blocks, threads, 0, p, exec)));
  return launch_map<place_mask_kernel, Order::second>(blocks, kMaskThreads, experts_bytes(p.stride), p, exec);
}

}  // namespace

int64_t permute_map_workspace_bytes(RoutingMap kind, int64_t items, int64_t experts) {
  const bool mask = kind == RoutingMap::mask;
  const Chunking chunks(items, mask);
  const int64_t bits = mask ? chunks.bits(experts) * static_cast<int64_t>(sizeof(uint32_t)) : 0;
  return bits + chunks.counts(experts) * static_cast<int64_t>(sizeof(uint16_t));
}

Status permute_map(const PermuteMapArgs& args, const Execution& exec) {
  const bool mask = args.kind == RoutingMap::mask;
  MapParams p{};
  p.routing = args.routing.data;
  p.row_id_map = args.row_id_map.as<int>(), p.source = args.source.as<int>();
  p.tokens_per_expert = args.tokens_per_expert.as<int>(), p.expert_offsets = args.expert_offsets.as<int>();
  p.items = mask ? args.routing.rows() : args.routing.numel();
  p.experts = static_cast<int>(args.tokens_per_expert.numel()), p.stride = static_cast<int>(stride_of(p.experts));
  p.align = args.align, p.rows = static_cast<int>(args.source.numel());
  const Chunking chunks(p.items, mask);
  p.chunk = chunks.size, p.chunks = static_cast<int>(chunks.count), p.chunk_stride = static_cast<int>(chunks.stride);
  p.bits = args.workspace.as<uint32_t>();
  p.counts = reinterpret_cast<uint16_t*>(p.bits + (mask ? chunks.bits(p.experts) : 0));
  const int64_t blocks = p.chunks > 0 ? p.chunks : 1;
  if (mask) return map_mask(blocks, p, exec);
  return args.routing.dtype == DType::i64 ? map_ids<int64_t>(blocks, p, exec) : map_ids<int32_t>(blocks, p, exec);
}

}  // namespace diptych::cuda
