// permute_map for a routing mask.
#include "cuda/permute/map.cuh"
#include "cuda/ptx/copy.cuh"

namespace diptych::cuda {
namespace {

constexpr int kWords = 4;  // words of 32 tokens that a block takes at once
constexpr int kLine = 16;  // experts that a thread of the first kernel takes at once, for eight tokens
constexpr int kCountThreads = kTile / kLine * kWords * 4;
constexpr int kPiece = 8192;  // bytes that the copy engine writes at once
static_assert(kWords * kTile == kPlaceThreads && 32 % kWords == 0);

// Loads the mask's bytes of 16 experts of a token; `there`: how many of them exist. kVec: bytes of a load; mask rows
// are multiples of it.
template <int kVec>
__device__ __forceinline__ void load_mask(const uint8_t* line, int there, uint32_t (&w)[4]) {
  if constexpr (kVec == 16) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(line));
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = 0;
      if constexpr (kVec == 4) {
        if (i * 4 < there) w[i] = __ldg(reinterpret_cast<const uint32_t*>(line) + i);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (i * 4 + j < there) w[i] |= static_cast<uint32_t>(__ldg(line + i * 4 + j)) << (8 * j);
        }
      }
    }
  }
}

// Transposes words among four lanes: each passes four words and gets the words at its own index from all four.
__device__ __forceinline__ void transpose_words(uint32_t (&w)[4], int lane) {
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    const bool upper = lane & d;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & d) continue;
      const uint32_t got = __shfl_xor_sync(0xffffffff, upper ? w[i] : w[i + d], d);
      (upper ? w[i] : w[i + d]) = got;
    }
  }
}
// Transposes the bytes of one thread's four words.
__device__ __forceinline__ void transpose_bytes(uint32_t (&w)[4]) {
  const uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
  const uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(a, b, 0x5410), w[1] = __byte_perm(a, b, 0x7632);
  w[2] = __byte_perm(c, d, 0x5410), w[3] = __byte_perm(c, d, 0x7632);
}

// Transposes a chunk's part of the mask to bits, with 32 tokens of one expert in a word, and counts them. A thread
// loads eight tokens and 16 experts, and four neighbours together a word's tokens; afterwards each of them has four
// experts.
template <int kVec>
__global__ void __launch_bounds__(kCountThreads, 1) count_mask_kernel(const __grid_constant__ MapParams p) {
  __shared__ int sums[kTile];
  ptx::let_next_grid_start();
  const int index = blockIdx.x / p.tiles, first_expert = (blockIdx.x - index * p.tiles) * kTile;
  const Chunk chunk(p, index);
  const int lanes = (min(kTile, p.experts) + kLine - 1) / kLine;  // across the tile
  const int octet = threadIdx.x % 4, group = threadIdx.x / 4 / lanes;
  const int expert = first_expert + (threadIdx.x / 4 - group * lanes) * kLine;
  const int there = group < kWords ? p.experts - expert : 0;
  const unsigned words = p.chunk / 32;
  for (int e = threadIdx.x; e < kTile; e += kCountThreads) sums[e] = 0;
  for (unsigned word = 0; word == 0 || chunk.first + word * 32 < chunk.last; word += kWords) {
    const unsigned token = chunk.first + (word + group) * 32 + octet * 8;
    uint32_t w[8][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      w[i][0] = w[i][1] = w[i][2] = w[i][3] = 0;
      if (there > 0 && token + i < chunk.last)
        load_mask<kVec>(static_cast<const uint8_t*>(p.routing) + static_cast<size_t>(token + i) * p.experts + expert,
                        there, w[i]);
    }
    if (word == 0) {  // while the loads are in flight
      fill_source(p);
      __syncthreads();
    }
    uint32_t own[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {  // bit i of a byte: whether token i's entry is not 0
      uint32_t flags = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t seven = 0x7f7f7f7f;
        flags = flags >> 1 | ((((w[i][q] & seven) + seven) | w[i][q]) & ~seven);
      }
      own[q] = flags;
    }
    transpose_words(own, octet);
    transpose_bytes(own);
    if (there > octet * 4 && word + group < words) {
      *reinterpret_cast<uint4*>(p.bits + (index * words + word + group) * p.stride + expert + octet * 4) =
          make_uint4(own[0], own[1], own[2], own[3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) atomicAdd(&sums[expert - first_expert + octet * 4 + j], __popc(own[j]));
    }
  }
  __syncthreads();
  if (chunk.first >= chunk.last) return;  // without tokens there are no counts
  for (int e = threadIdx.x; e < min(kTile, p.experts - first_expert); e += kCountThreads)
    counts_of(p, index / kPage, first_expert + e)[index % kPage] = static_cast<uint16_t>(sums[e]);
}

// Stores -1 to all entries of a chunk for a tile's experts. The copy engine's stores run until end_lines, while counts
// are loaded and added. `absent`: kPiece bytes of shared memory.
__device__ __forceinline__ void begin_lines(const MapParams& p, const Chunk& chunk, int first_expert, int4* absent) {
  const int tokens = static_cast<int>(chunk.last - chunk.first), width = min(kTile, p.experts - first_expert);
  int* lines = p.row_id_map + static_cast<size_t>(chunk.first) * p.experts + first_expert;
  if constexpr (ptx::kBulk) {
    if (p.experts % 4 == 0 && reinterpret_cast<uintptr_t>(lines) % 16 == 0) {
      for (int i = threadIdx.x; i < kPiece / 16; i += kPlaceThreads) absent[i] = make_int4(-1, -1, -1, -1);
      ptx::bulk_sees_stores();
      __syncthreads();
      if (threadIdx.x >= 32) return;
      // If a tile has all experts, its lines are contiguous.
      const int run = p.tiles == 1 ? kPiece / 4 : width, step = p.tiles == 1 ? run : p.experts;
      const int n = tokens * p.experts, pieces = (n + step - 1) / step;
      for (int i = threadIdx.x; i < pieces; i += 32) {
        const int at = (i + blockIdx.x) % pieces * step;  // blocks start at different places of their chunks
        ptx::bulk_store(lines + at, absent, min(run, n - at) * 4);
      }
      ptx::bulk_commit();
      return;
    }
  }
  for (int t = threadIdx.x / 32; t < tokens; t += kPlaceThreads / 32) {
    for (int c = threadIdx.x % 32; c < width; c += 32) lines[static_cast<size_t>(t) * p.experts + c] = -1;
  }
}
// Waits for the stores of begin_lines, so that later stores are not overwritten. All threads of the block call it.
__device__ __forceinline__ void end_lines() {
  if constexpr (ptx::kBulk) {
    if (threadIdx.x < 32) ptx::bulk_wait();
  }
  __syncthreads();
}

// A thread takes one expert and 32 tokens and visits the bits that are set; neighbours have the same expert's next
// tokens.
__global__ void __launch_bounds__(kPlaceThreads, 1) place_mask_kernel(const __grid_constant__ MapParams p) {
  DIPTYCH_DYNAMIC_SHARED(raw);
  __shared__ __align__(16) int4 absent[kPiece / 16];
  ptx::let_next_grid_start();
  const int index = blockIdx.x / p.tiles, first_expert = (blockIdx.x - index * p.tiles) * kTile;
  const int e = first_expert + threadIdx.x / kWords, q = threadIdx.x % kWords;
  const Chunk chunk(p, index);
  const unsigned words = p.chunk / 32, used = (chunk.last - chunk.first + 31) / 32;
  const uint32_t* bits = p.bits + (index * words + q) * p.stride + e;
  const Experts experts(raw, p.stride);
  begin_lines(p, chunk, first_expert, absent);  // nothing else uses that memory since the first kernel's launch
  ptx::wait_for_grid_before();

  auto load = [&](unsigned w0) { return e < p.experts && w0 + q < used ? bits[w0 * p.stride] : 0; };
  uint32_t own = load(0);
  place_experts<kPlaceThreads>(p, index, experts);
  end_lines();
  int next = e < p.experts ? experts.next[e] : 0;
  for (unsigned w0 = 0; w0 < used; w0 += kWords) {
    if (w0 != 0) own = load(w0);
    int upto = __popc(own);
    const int mine = upto;
#pragma unroll
    for (int d = 1; d < kWords; d *= 2) {
      const int below = __shfl_up_sync(0xffffffff, upto, d, kWords);
      if (q >= d) upto += below;
    }
    const int line = static_cast<int>(chunk.first + (w0 + q) * 32) * p.experts + e;
    int row = next + upto - mine;
    for (uint32_t v = own; v != 0 && row < p.rows; v &= v - 1, ++row) {
      const int entry = line + (__ffs(v) - 1) * p.experts;
      p.row_source[row] = entry;
      p.row_id_map[entry] = row;
    }
    next += __shfl_sync(0xffffffff, upto, kWords - 1, kWords);
  }
}

}  // namespace

Status map_mask(const MapParams& p, const Execution& exec) {
  const int64_t blocks = static_cast<int64_t>(p.chunks > 0 ? p.chunks : 1) * p.tiles;
  auto fits = [&](int bytes) { return p.experts % bytes == 0 && aligned(p.routing, bytes); };
  auto count = [&](auto vec) {
    return launch_map<count_mask_kernel<vec.value>, Order::first>(blocks, kCountThreads, 0, p, exec);
  };
  DIPTYCH_TRY((fits(16)  ? count(std::integral_constant<int, 16>{})
               : fits(4) ? count(std::integral_constant<int, 4>{})
                         : count(std::integral_constant<int, 1>{})));
  return launch_map<place_mask_kernel, Order::second>(blocks, kPlaceThreads, experts_bytes(p.stride), p, exec);
}

}  // namespace diptych::cuda
