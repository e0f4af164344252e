// permute for large tensors. DRAM loses time whenever it switches between reads and writes, so few reads between many
// writes are expensive. Here every SM fills its shared memory and registers with tokens, and then writes them to all of
// their rows. A launch takes a slice of the tokens that fits all SMs. Its blocks start as those of the slice before
// end, fill absent rows until all of those have written, and then read at the same time. The copy engine writes only
// from shared memory: tokens in registers are moved there as soon as the first tokens have left it.
#include <algorithm>

#include "cuda/base/launch.cuh"
#include "cuda/kernels.h"
#include "cuda/permute/origin.cuh"
#include "cuda/permute/rows.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/grid.cuh"
#include "diptych/permute.h"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kEntries = 16;           // entries of the map that a thread reads at once
constexpr int kVectors = 16;           // vectors of 16 bytes that a thread keeps in registers
constexpr int kProbs = 2;              // probabilities that a thread moves at once
constexpr int kShared = 226 << 10;     // bytes of tokens and fillings; an SM has room for one block
constexpr int kFilling = 2 << 10;      // bytes of an absent row that are stored at once
constexpr int64_t kLeastToken = 128;   // bytes
constexpr int64_t kLeastLong = 2048;   // the same for a token in several planes or with many slots
constexpr int64_t kLeastMoved = 16e6;  // bytes written; for fewer a launch with so much shared memory does not pay
constexpr int kDramPiece = 64;         // bytes that DRAM reads for one probability
constexpr int kManyRows = 4;           // least rows per token with several planes, which are written separately
constexpr int kManySlots = 64;  // from here half as many rows suffice: the other kernel reads them for every 512 bytes

struct SliceParams {
  RowBytes planes[kMaxPlanes];
  int plane_count;
  int token_bytes;  // bytes of a token in all planes
  const int* row_id_map;
  const int* row_source;
  const void* probs;
  void* permuted_probs;
  int prob_bytes;   // 0: none
  int probs_ahead;  // bytes of probabilities that a block of the first slice prefetches to L2, or 0
  int tokens, slots, rows;
  Divider by_slots;
  int each, held;     // tokens of a block; rows of the first plane that fit shared memory
  int first;          // the slice's first token
  int block, blocks;  // the slice's first block among all slices' blocks, and their number
  bool waits;         // whether it reads only after the slice before it has written
};

// Prefetches probabilities, because reading a single one costs DRAM as much as 64 bytes. Prefetches may come before the
// wait, since L2 is coherent.
__device__ __forceinline__ void prefetch_probs(const SliceParams& p) {
  const int64_t all = static_cast<int64_t>(p.tokens) * p.slots * p.prob_bytes, at = int64_t{p.probs_ahead} * blockIdx.x;
  if (all - at < 16) return;
  const auto from = reinterpret_cast<uintptr_t>(p.probs) / 16 * 16 + at;
  ptx::bulk_prefetch(reinterpret_cast<const void*>(from),
                     static_cast<int>(min(all - at, int64_t{p.probs_ahead}) / 16 * 16));
}

// Moves probabilities in order of destination rows: in order of tokens, writes would be scattered parts of sectors.
__device__ __forceinline__ void move_probs(const SliceParams& p) {
  const unsigned entries = static_cast<unsigned>(p.tokens) * static_cast<unsigned>(p.slots);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t r0 = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; r0 < p.rows; r0 += step * kProbs) {
    int from[kProbs];
    uint64_t bits[kProbs];
#pragma unroll
    for (int i = 0; i < kProbs; ++i) from[i] = r0 + i * step < p.rows ? p.row_source[r0 + i * step] : -1;
#pragma unroll
    for (int i = 0; i < kProbs; ++i)
      bits[i] = static_cast<unsigned>(from[i]) < entries ? load_bits(p.probs, from[i], p.prob_bytes) : 0;
#pragma unroll
    for (int i = 0; i < kProbs; ++i) {
      if (r0 + i * step < p.rows) store_bits(p.permuted_probs, r0 + i * step, p.prob_bytes, bits[i]);
    }
  }
}

template <int kPlanes>  // most planes
__global__ void __launch_bounds__(kThreads, 1) permute_slice_kernel(const __grid_constant__ SliceParams p) {
  DIPTYCH_DYNAMIC_SHARED_ALIGNED(shared, 128);
  __shared__ __align__(8) uint64_t landed;
  if constexpr (ptx::kBulk) {
    const bool is_first = p.block == 0, is_last = p.block + static_cast<int>(gridDim.x) == p.blocks;
    const int token = p.first + static_cast<int>(blockIdx.x) * p.each, n = max(0, min(p.each, p.tokens - token));
    const int held = min(n, p.held);
    // Calls f(index, plane, bytes of a row, the block's rows in shared memory, a piece of an absent row behind them).
    auto for_planes = [&](auto&& f) {
      uint8_t* at = shared;
      for (int i = 0; i < (kPlanes == 1 ? 1 : p.plane_count); ++i) {
        const int bytes = static_cast<int>(p.planes[i].bytes), rows = i == 0 ? p.held : p.each;
        f(i, p.planes[i], bytes, at, at + rows * bytes);
        at += rows * bytes + kFilling;
      }
    };
    // Calls f(vector, its place from `at` on) for the rows of the first plane that are kept in registers.
    const int kept_vectors = (n - held) * static_cast<int>(p.planes[0].bytes) / 16;
    uint4 kept[kVectors];
    auto for_kept = [&](auto* at, auto&& f) {
      at += threadIdx.x;
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (u * kThreads < kept_vectors - static_cast<int>(threadIdx.x)) f(kept[u], at + u * kThreads);
      }
    };
    auto ask_tokens = [&] {
      if (threadIdx.x == 0) {
        ptx::barrier_init(&landed, 1);
        ptx::barrier_init_fence();
        ptx::barrier_arrive_expect(&landed, n * p.token_bytes - kept_vectors * 16);
        if (n > 0) {
          for_planes([&](int plane, const RowBytes& r, int bytes, uint8_t* at, uint8_t*) {
            ptx::bulk_load_once(at, r.in + static_cast<int64_t>(token) * bytes, (plane == 0 ? held : n) * bytes,
                                &landed);
          });
        }
      }
      for_kept(reinterpret_cast<const uint4*>(p.planes[0].in + (token + held) * p.planes[0].bytes),
               [](uint4& v, const uint4* from) { v = ptx::load_once(from); });
    };
    const int64_t map = static_cast<int64_t>(token) * p.slots;
    int row[kEntries];
    auto look = [&](int q0) {
#pragma unroll
      for (int j = 0; j < kEntries; ++j) {
        const int q = q0 + j * kThreads + threadIdx.x;
        row[j] = q < n * p.slots ? p.row_id_map[map + q] : -1;
      }
    };

    for_planes([&](int, const RowBytes& r, int, uint8_t*, uint8_t* filling) {
      if (threadIdx.x < kFilling / 16) reinterpret_cast<uint4*>(filling)[threadIdx.x] = fill_of<uint4>(r.fill, 0);
    });
    ptx::bulk_sees_stores();
    __syncthreads();
    if (is_first) {
      if (threadIdx.x == 0 && p.probs_ahead != 0) prefetch_probs(p);
      ptx::wait_for_grid_before();
      look(0);
    }
    if (!p.waits) ask_tokens();
    if (is_first && p.prob_bytes != 0) move_probs(p);
    if (!is_last) ptx::let_next_grid_start();  // the first slice has waited for the data of all slices
    for (int64_t to = p.block + static_cast<int>(blockIdx.x) + static_cast<int64_t>(threadIdx.x) * p.blocks;
         to < p.rows; to += static_cast<int64_t>(kThreads) * p.blocks) {
      if (p.row_source[to] >= 0) continue;
      for_planes([&](int, const RowBytes& r, int bytes, uint8_t*, uint8_t* filling) {
        for (int i = 0; i < bytes; i += kFilling)
          ptx::bulk_store(r.out + to * bytes + i, filling, min(bytes - i, kFilling));
      });
    }
    ptx::bulk_commit();
    if (p.waits) ptx::wait_for_grid_before();
    if (!is_first) look(0);
    if (p.waits) ask_tokens();
    __syncthreads();
    ptx::barrier_wait(&landed, 0);
    const int first = n - held;  // tokens that are written first, to make room for those in registers
    int looked = 0;
#pragma unroll 1
    for (int from = 0, to = 0; from < n; from = to) {
      to = from < first ? first : from < held ? held : n;
      if (from == held) {
        ptx::bulk_wait_read<1>();
        __syncthreads();
        for_kept(reinterpret_cast<uint4*>(shared), [](const uint4& v, uint4* at) { *at = v; });
        ptx::bulk_sees_stores();
        __syncthreads();
      }
      constexpr int kLook = kEntries * kThreads;
      for (int q0 = from * p.slots / kLook * kLook; q0 < to * p.slots; q0 += kLook) {
        if (q0 != looked) look(q0), looked = q0;
#pragma unroll
        for (int j = 0; j < kEntries; ++j) {
          const int q = q0 + j * kThreads + static_cast<int>(threadIdx.x);
          if (q < from * p.slots || q >= to * p.slots) continue;
          if (static_cast<unsigned>(row[j]) >= static_cast<unsigned>(p.rows)) continue;
          const int t = static_cast<int>(p.by_slots(q));
          for_planes([&](int plane, const RowBytes& r, int bytes, uint8_t* at, uint8_t*) {
            const int slot = plane == 0 && t >= held ? t - held : t;
            ptx::bulk_store(r.out + static_cast<int64_t>(row[j]) * bytes, at + slot * bytes, bytes);
          });
        }
      }
      ptx::bulk_commit();
    }
    ptx::bulk_wait_read();
    if (!is_first && !p.waits) ptx::wait_for_grid_before();
  }
}

}  // namespace

bool permute_slices_fits(const PermuteArgs& args) {
  if (args.zero_prob_is_padding) return false;
  int64_t bytes = 0;
  for (int i = 0; i < args.plane_count; ++i) {
    const RowBytes r = row_bytes(args.planes[i]);
    if (r.unit != 16 || r.bytes == 0) return false;
    bytes += r.bytes;
  }
  const int64_t tokens = args.row_id_map.rows(), rows = args.row_source.numel();
  const bool one = args.plane_count == 1, many_slots = args.row_id_map.cols() >= kManySlots;
  const int64_t least_rows = one ? 0 : many_slots ? kManyRows / 2 : kManyRows;
  return args.row_id_map.numel() > 0 && rows >= least_rows * tokens && rows * bytes >= kLeastMoved &&
         bytes >= (one && !many_slots ? kLeastToken : kLeastLong) && bytes <= kShared / 8;
}

Status permute_slices(const PermuteArgs& args, const Execution& exec) {
  static SharedGrant grants[2];
  const bool one = args.plane_count == 1;
  const auto kernel = one ? permute_slice_kernel<1> : permute_slice_kernel<kMaxPlanes>;
  DIPTYCH_TRY(grants[one].raise(kernel, exec.device.index, kShared, cudaSharedmemCarveoutMaxShared));
  SliceParams p{};
  p.plane_count = args.plane_count;
  for (int i = 0; i < args.plane_count; ++i) {
    p.planes[i] = row_bytes(args.planes[i]);
    p.token_bytes += static_cast<int>(p.planes[i].bytes);
  }
  p.row_id_map = args.row_id_map.as<const int>(), p.row_source = args.row_source.as<const int>();
  p.probs = args.probs.data, p.permuted_probs = args.permuted_probs.data;
  p.prob_bytes = args.probs.given() ? bytes(args.probs.dtype) : 0;
  p.tokens = static_cast<int>(args.row_id_map.rows()), p.slots = static_cast<int>(args.row_id_map.cols());
  p.by_slots = Divider(p.slots), p.rows = static_cast<int>(args.row_source.numel());
  const int64_t grid = device_info(exec.device.index).sm_count;
  const int64_t all_probs = args.row_id_map.numel() * p.prob_bytes;  // bytes
  p.probs_ahead = int64_t{p.rows} * kDramPiece < all_probs ? 0 : static_cast<int>(ceil_div(all_probs, grid * 16) * 16);
  // Registers keep rows of the first plane, at most of as many tokens as shared memory holds before these rows move
  // there.
  const int64_t row = p.planes[0].bytes, token = p.token_bytes, room = kShared - p.plane_count * kFilling;
  const int64_t most =
      std::min((room + int64_t{kVectors} * kThreads * 16 / row * row) / token, room / (2 * token - row) * 2);
  const int64_t slices = ceil_div(p.tokens, grid * most);
  p.blocks = static_cast<int>(grid * slices);
  for (int64_t s = 0; s < slices; ++s) {
    p.block = static_cast<int>(grid * s), p.first = static_cast<int>(p.block * most);
    p.each = static_cast<int>(std::min(most, ceil_div(p.tokens - p.first, grid)));
    p.held = static_cast<int>(std::min(int64_t{p.each}, (room - p.each * (token - row)) / row));
    p.waits = s > 0 && p.each * 4 > most;  // a slice of few tokens may read while others write
    DIPTYCH_TRY(launch_after("permute", kernel, grid, kThreads, kShared, exec, p));
  }
  return {};
}

}  // namespace diptych::cuda
