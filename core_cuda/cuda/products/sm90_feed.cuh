// The native grouped kernel's shared memory, and the warps that fill it.
#pragma once

#include "cuda/base/device.h"
#include "cuda/products/sm90_decode.cuh"
#include "cuda/products/sm90_store.cuh"

namespace diptych::cuda {

constexpr int kRound = 4;  // k blocks whose scales are loaded together; with promotion also the number of stages
constexpr int kTiles = 2;  // tiles that are announced ahead to the multiplying warps
constexpr int kMaxShared = 232448;  // bytes of shared memory that a thread block of sm_90 may have

// The scales of a round: each row of A has the scales of four k blocks side by side, and each k block has a line of
// B's. Mode columns: a line holds the two blocks of B that a tile may touch.
template <Promotion kMode, bool kTall>
struct Scales {
  static constexpr TileShape kTile = tile_shape(kMode, kTall);
  static constexpr bool kAny = kMode == Promotion::columns || kMode == Promotion::full;
  static constexpr int kB = kMode == Promotion::full ? kTile.n : 2;
  float4 a[kAny ? kTile.m : 1];
  float b[kRound][kB];
};

// A slot of a ring of `kSlots`, and the parity of its barriers' phase.
template <int kSlots>
struct Turn {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

template <Promotion kMode_, bool kTall, bool kWide, int kDecoders_>
struct alignas(1024) NativeShared {
  static constexpr int kDecoders = kDecoders_;  // threads that decode operands to bfloat16, or 0
  static constexpr bool kDecodes = kDecoders > 0, kMany = kDecoders > kFewDecoders;
  static constexpr Promotion kMode = kMode_;
  static constexpr TileShape kTile = tile_shape(kMode, kTall);
  static constexpr int kTileM = kTile.m, kTileN = kTile.n;
  static constexpr int kWarpgroups = kTileM / 64;  // that multiply
  static constexpr int kProducts = kWarpgroups * kGroupThreads;
  static constexpr int kThreads = kProducts + (kMany ? 2 : 1) * kGroupThreads;
  // Sums of one product instruction. Four warpgroups have too few registers for those of 128 sums.
  static constexpr int kSums = kMany ? 64 : kTileN / 2;
  using Scales = cuda::Scales<kMode, kTall>;
  // Storing by single elements takes registers that wide tiles with partial sums do not have.
  static constexpr bool kPieces = kTall || kMode == Promotion::none;
  static constexpr bool kRounds = kMode != Promotion::none, kScales = Scales::kAny;
  static constexpr int kABytes = kTileM * kNativeTileK, kBBytes = kTileN * kNativeTileK;
  static constexpr int kStageBytes = kABytes + kBBytes;
  using Out = cuda::Out<kWide, !kScales, kTileN>;
  using Walker = cuda::Walker<kTile>;
  static constexpr int kRest = kWarpgroups * Out::kBytes + 1024 + 2 * sizeof(Scales) + sizeof(Table) + 512 +
                               (kDecodes ? sizeof(DecodeShared) : 0);
  static constexpr int kMostStages = (kMaxShared - kRest) / kStageBytes;
  static constexpr int kStages = kRounds ? kRound : kMostStages;
  static_assert(kStages >= 3 && kStages <= kMostStages, "too few stages to hide memory latency, or more than fit");

  unsigned char operands[kStages][kStageBytes];  // of A, then of B
  unsigned char out[kWarpgroups][Out::kBytes];
  unsigned char zeros[1024];
  Scales scales[2];
  uint64_t full[kStages], empty[kStages];
  uint64_t scales_full[2], scales_empty[2];
  uint64_t c_there[kWarpgroups];
  uint64_t tiles_full[kTiles], tiles_empty[kTiles];
  Tile tiles[kTiles];
  Table table;
  std::conditional_t<kDecodes, DecodeShared, char> decode;

  // The number of a tile's stages. With promotion they are whole rounds, so that each tile begins with stage 0.
  __device__ __forceinline__ static int stages(const Tile& t) {
    return kRounds ? (t.blocks() + kRound - 1) / kRound * kRound : t.blocks();
  }
};

template <typename Shared>
__device__ __forceinline__ void fetch_operands(const NativeArgs& p, Shared& s, typename Shared::Walker walk, int rank) {
  constexpr uint32_t kBoth = 3;
  constexpr int kHalfA = Shared::kABytes / 2, kHalfB = Shared::kBBytes / 2;
  constexpr int kHalfM = Shared::kTileM / 2, kHalfN = Shared::kTileN / 2;
  const bool leader = threadIdx.x % 32 == 0;
  Turn<Shared::kStages> turn;
  bool all_ready = false;
  for (Tile t; walk.next(t);) {
    const int stack = p.depth ? 0 : t.group, end = t.k + Shared::stages(t) * kNativeTileK;
    for (int k = t.k, until = end; k < end; k = until) {
      if (Shared::kDecodes) until = min(end, wait_for_units(p, s.table, t, k, rank, all_ready));
      if (!leader) continue;
      for (; k < until; k += kNativeTileK, turn.advance()) {
        unsigned char *a = s.operands[turn.slot], *b = a + Shared::kABytes;
        uint64_t* full = &s.full[turn.slot];
        ptx::barrier_wait(&s.empty[turn.slot], turn.parity ^ 1);
        if (k >= t.k_end) {  // a stage that only fills the round
          ptx::barrier_arrive(full);
          continue;
        }
        ptx::barrier_arrive_expect(full, Shared::kStageBytes);
        if (t.below) {
          ptx::copy_box(a, &p.a, full, k, t.row);
          ptx::copy_box(a + kHalfA, &p.a, full, k, t.row + kHalfM);
          ptx::copy_box_to(kBoth, b + rank * kHalfB, &p.b, full, k, t.col + rank * kHalfN, stack);
        } else {
          ptx::copy_box_to(kBoth, a + rank * kHalfA, &p.a, full, k, t.row + rank * kHalfM);
          ptx::copy_box(b, &p.b, full, k, t.col, stack);
          ptx::copy_box(b + kHalfB, &p.b, full, k, t.col + kHalfN, stack);
        }
      }
    }
    __syncwarp();
  }
}

// Announces tiles to the multiplying warps. One warp does so, because finding a tile takes hundreds of instructions.
template <typename Shared>
__device__ __forceinline__ void announce_tiles(Shared& s, typename Shared::Walker walk) {
  const bool leader = threadIdx.x % 32 == 0;
  Turn<kTiles> turn;
  for (bool more = true; more; turn.advance()) {
    Tile t;
    more = walk.next(t);
    if (!more) t.group = kNoMoreTiles;
    if (leader) {
      ptx::barrier_wait(&s.tiles_empty[turn.slot], turn.parity ^ 1);
      s.tiles[turn.slot] = t;
      ptx::barrier_arrive(&s.tiles_full[turn.slot]);
    }
    __syncwarp();
  }
}

// Loads block scales with one warp. It shares issue slots with two of the multiplying warps, and they wait for each
// other, so what does not change within a tile is computed before the loop. Scales that do not exist arrive as zeros.
template <typename Shared>
__device__ __forceinline__ void fetch_scales(const NativeArgs& p, Shared& s, typename Shared::Walker walk) {
  constexpr int kA = Shared::kTileM / 32;
  constexpr int kB = Shared::Scales::kB * kRound, kStep = 32 / kRound;  // B's: a lane's columns are kStep apart
  const int outer = p.depth ? p.m : p.rows, lane = threadIdx.x % 32, b_col = lane / kRound, b_k = lane % kRound;
  const int64_t step = static_cast<int64_t>(kStep) * p.scale_k;
  Turn<2> turn;
  for (Tile t; walk.next(t);) {
    const int blocks = t.blocks(), first = t.k / kNativeTileK, b_first = t.col >> p.b_shift;
    const float* a[kA];
#pragma unroll
    for (int i = 0; i < kA; ++i) {
      const int at = min(t.row + lane + i * 32, outer - 1) >> p.a_shift;
      a[i] = p.a_scale + static_cast<int64_t>(at) * p.scale_k + first;
    }
    const float* b = p.b_scale + (p.depth ? 0 : max(t.group, 0) * p.b_scale_stack) +
                     static_cast<int64_t>(b_first + b_col) * p.scale_k + first + b_k;
    const int b_left = ((p.n - 1) >> p.b_shift) + 1 - b_first - b_col;
    const bool aligned = p.whole_scales && first % kRound == 0;
    for (int block = 0; block < blocks; block += kRound, turn.advance()) {
      const int left = blocks - block;
      typename Shared::Scales& to = s.scales[turn.slot];
      ptx::barrier_wait(&s.scales_empty[turn.slot], turn.parity ^ 1);
      if (aligned && left >= kRound) {
#pragma unroll
        for (int i = 0; i < kA; ++i) ptx::copy_async16(&to.a[lane + i * 32], a[i], true);
      } else {
#pragma unroll 1
        for (int j = 0; j < kRound; ++j) {
#pragma unroll
          for (int i = 0; i < kA; ++i) ptx::copy_async4(&to.a[lane + i * 32].x + j, a[i] + j, j < left);
        }
      }
#pragma unroll
      for (int i = 0; i < kA; ++i) a[i] += kRound;
#pragma unroll
      for (int i = 0; i < (kB + 31) / 32; ++i) {
        if (kB >= 32 || lane < kB) {
          ptx::copy_async4(&to.b[b_k][b_col + i * kStep], b + i * step, b_k < left && i * kStep < b_left);
        }
      }
      b += kRound;
      ptx::barrier_arrive_after_copies(&s.scales_full[turn.slot]);
    }
    __syncwarp();
  }
}

}  // namespace diptych::cuda
