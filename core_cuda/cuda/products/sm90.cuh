// Products on Hopper's tensor cores, of FP8 or bfloat16, in groups or of one group: D tiles of 128 rows and 192 or 256
// columns, or of 192 rows and 128 columns; persistent thread blocks.
//
// Two or three warpgroups of a thread block multiply 64 rows each: while the products of one run, the others promote
// partial sums. The last warpgroup feeds them (sm90_feed.cuh): one warp makes the copy engine load 128 k of A's and
// B's rows, several stages ahead; one loads block scales, four k blocks at a time; one announces the next tiles. The
// two thread blocks of a cluster share a tile of A or B, and each loads half of it for both.
//
// Large products reach the chip's power limit, which lowers its clock, so fewer instructions and less traffic make them
// faster. Wide tiles read A less often; registers hold sums and partial sums of up to 192 columns.
//
// A tile of A may reach past its group; the sums of the rows past it are never stored. Rows past the tensor and k past
// its end arrive as zeros.
#pragma once

#include "cuda/base/launch.cuh"
#include "cuda/products/sm90_feed.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace diptych::cuda {

// The factors of a k block's partial sums: A's scales of this thread's two rows (`row`) times B's scales. Mode columns:
// `part` holds that product for each 64 columns of the tile. Mode full: `columns` points to the scales of this thread's
// columns, which are eight apart.
template <typename Scales, Promotion kMode>
struct Factors {
  static constexpr int kParts = Scales::kTile.n == 128 ? 1 : 3;  // of a tile's columns
  float row[2], part[kParts][2];
  const float* columns;

  // `early`: the second of B's two blocks begins after 64 columns, else after 128.
  __device__ __forceinline__ void load(const Scales& s, int block, int at_row, int lane, bool early) {
    if constexpr (Scales::kAny) {
      const float* a = &s.a[at_row].x + block;
      row[0] = a[0], row[1] = a[8 * kRound];
      columns = &s.b[block][kMode == Promotion::full ? lane % 4 * 2 : 0];
    }
    if constexpr (kMode == Promotion::columns) {
      const float2 both = *reinterpret_cast<const float2*>(columns);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        part[0][h] = __fmul_rn(row[h], both.x);
        if constexpr (kParts > 1) {
          part[2][h] = __fmul_rn(row[h], both.y);
          part[1][h] = early ? part[2][h] : part[0][h];
        }
      }
    }
  }
};

// sums = sums + part * factors.
template <Promotion kMode, int kSums, typename Factors>
__device__ __forceinline__ void promote(float (&sums)[kSums], const float (&part)[kSums], const Factors& f) {
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    float2 col;
    if constexpr (kMode == Promotion::full) col = *reinterpret_cast<const float2*>(f.columns + j * 8);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = j * 4 + r;
      if constexpr (kMode == Promotion::full) {
        sums[i] = __fmaf_rn(part[i], __fmul_rn(f.row[r / 2], r % 2 ? col.y : col.x), sums[i]);
      } else if constexpr (kMode == Promotion::columns) {
        sums[i] = __fmaf_rn(part[i], f.part[j * Factors::kParts / (kSums / 4)][r / 2], sums[i]);
      } else {
        sums[i] = __fadd_rn(sums[i], part[i]);
      }
    }
  }
}

// Multiplies the first `left` of 128 k, rounded up to a multiple of 32, of 64 rows into d. `add`: adds to what d holds.
// Operands past `left` may belong to another group, so zeros are multiplied there instead; a branch between the
// products is not allowed. kAtOnce: the sums of one instruction.
template <ptx::Element kA, ptx::Element kB, int kAtOnce, int kSums>
__device__ __forceinline__ void multiply_block(float (&d)[kSums], uint32_t a, uint32_t b, bool add, uint32_t zeros,
                                               int left) {
  constexpr int kColumns = 2 * kAtOnce;
  ptx::products_touch(d);
  ptx::products_begin();
#pragma unroll
  for (int i = 0; i < kNativeTileK / 32; ++i) {
    const bool inside = i * 32 < left;
#pragma unroll
    for (int j = 0; j < kSums / kAtOnce; ++j) {
      const uint32_t at = b + j * (kColumns * kNativeTileK / 16) + i * 2;
      ptx::product<kA, kB, kAtOnce>(d + j * kAtOnce, inside ? ptx::matrix(a + i * 2) : ptx::repeated_matrix(zeros),
                                    inside ? ptx::matrix(at) : ptx::repeated_matrix(zeros), add || i > 0);
    }
  }
  ptx::products_commit();
  ptx::products_touch(d);
}

// The state that a multiplying warpgroup keeps from tile to tile.
template <int kStages>
struct Worker {
  int group, lane;
  int row;         // this thread's first row in a tile; its second is eight below
  uint32_t empty;  // the `empty` barriers of a thread block of the cluster, one for each lane below kNativeCluster
  Turn<kStages> stage;
  Turn<2> scales;

  __device__ __forceinline__ void release(int slot) const {
    if (lane < kNativeCluster) ptx::remote_barrier_arrive(empty + slot * sizeof(uint64_t));
  }
};

// Waits for a stage and releases it without using its operands.
template <typename Shared>
__device__ __forceinline__ void skip_stage(Shared& s, Worker<Shared::kStages>& w) {
  ptx::barrier_wait(&s.full[w.stage.slot], w.stage.parity);
  __syncwarp();  // a lane that lags behind the release could miss a phase
  w.release(w.stage.slot);
  w.stage.advance();
}

template <typename Shared>
__device__ __forceinline__ void skip_tile(Shared& s, Worker<Shared::kStages>& w, const Tile& t) {
  for (int i = Shared::stages(t); i > 0; --i) {
    skip_stage(s, w);
    if (Shared::kScales && w.stage.slot == 0) {
      ptx::barrier_wait(&s.scales_full[w.scales.slot], w.scales.parity);
      ptx::barrier_arrive(&s.scales_empty[w.scales.slot]);
      w.scales.advance();
    }
  }
}

// The addresses of stage 0's operands for one warpgroup.
template <typename Shared>
struct Operands {
  static constexpr uint32_t kStage = Shared::kStageBytes / 16;
  uint32_t a, b, zeros;

  __device__ __forceinline__ Operands(const Shared& s, int group)
      : a(ptx::matrix_address(s.operands[0]) + group * (64 * kNativeTileK / 16)),
        b(ptx::matrix_address(s.operands[0]) + Shared::kABytes / 16),
        zeros(ptx::matrix_address(s.zeros)) {}
};

// sums = A @ B.T over the tile's k, summed in the tensor cores alone.
template <ptx::Element kA, ptx::Element kB, int kSums, typename Shared>
__device__ __forceinline__ void multiply_tile(const NativeArgs& p, Shared& s, Worker<Shared::kStages>& w, const Tile& t,
                                              float (&sums)[kSums]) {
  const Operands<Shared> at(s, w.group);
  const int blocks = t.blocks();
  int held = 0;
  for (int block = 0; block < blocks; ++block) {
    const int slot = w.stage.slot, left = p.depth ? t.k_end - t.k - block * kNativeTileK : kNativeTileK;
    ptx::barrier_wait(&s.full[slot], w.stage.parity);
    multiply_block<kA, kB, Shared::kSums>(sums, at.a + slot * at.kStage, at.b + slot * at.kStage, true, at.zeros, left);
    ptx::products_wait<1>();
    if (block > 0) w.release(held);
    held = slot;
    w.stage.advance();
  }
  ptx::products_wait<0>();
  ptx::products_touch(sums);
  if (blocks > 0) w.release(held);
}

// sums = A @ B.T over the tile's k, with partial sums of each 128 k. Whole rounds are unrolled, so that slots are
// constants: one warpgroup's instructions between its products must not take longer than the other warpgroup's
// products.
template <Promotion kMode, ptx::Element kA, ptx::Element kB, int kSums, typename Shared>
__device__ __forceinline__ void multiply_tile_in_parts(const NativeArgs& p, Shared& s, Worker<Shared::kStages>& w,
                                                       const Tile& t, float (&sums)[kSums]) {
  const Operands<Shared> at(s, w.group);
  const bool early = t.col % 128 != 0;
  // With block scales a k block belongs to one group; past the tensor's last row there are zeros.
  const bool cut = !Shared::kScales && p.depth;
  int left = t.k_end - t.k;
  if (left <= 0) return;
  bool there = false;  // whether the next stage's operands have arrived
  Factors<typename Shared::Scales, kMode> factors;
  const auto wait_for_scales = [&] {
    if (Shared::kScales) ptx::barrier_wait(&s.scales_full[w.scales.slot], w.scales.parity);
  };
  const auto end_round = [&](int scales) {
    if (Shared::kScales) ptx::barrier_arrive(&s.scales_empty[scales]);
  };
  // The next block's factors are loaded while this block's products run.
  const auto multiply = [&](int slot, int k, bool more) {
    const int scales = w.scales.slot, next = (slot + 1) % kRound;
    float part[kSums];
    if (!there) ptx::barrier_wait(&s.full[slot], w.stage.parity);
    multiply_block<kA, kB, Shared::kSums>(part, at.a + slot * at.kStage, at.b + slot * at.kStage, false, at.zeros, k);
    if (next == 0) w.stage.parity ^= 1, w.scales.advance();
    Factors<typename Shared::Scales, kMode> after;
    if (more) {
      if (next == 0) wait_for_scales();
      after.load(s.scales[w.scales.slot], next, w.row, w.lane, early);
      there = ptx::barrier_try(&s.full[next], w.stage.parity);
    }
    ptx::products_wait<0>();
    ptx::products_touch(part);
    w.release(slot);
    promote<kMode>(sums, part, factors);
    if (next == 0) end_round(scales);
    factors = after;
  };
  wait_for_scales();
  factors.load(s.scales[w.scales.slot], 0, w.row, w.lane, early);
  for (constexpr int kRoundK = kRound * kNativeTileK; left >= kRoundK; left -= kRoundK) {
#pragma unroll
    for (int slot = 0; slot < kRound; ++slot) multiply(slot, kNativeTileK, slot + 1 < kRound || left > kRoundK);
  }
  if (left <= 0) return;
#pragma unroll 1
  for (int slot = 0; slot < kRound; ++slot, left -= kNativeTileK) {
    if (left > 0) {
      multiply(slot, cut ? left : kNativeTileK, left > kNativeTileK);
    } else {
      w.stage.slot = slot;
      skip_stage(s, w);
      if (w.stage.slot == 0) end_round(w.scales.slot), w.scales.advance();
    }
  }
}

template <Promotion kMode, ptx::Element kA, ptx::Element kB, typename Shared>
__device__ __forceinline__ void multiply_tiles(const NativeArgs& p, Shared& s, int warp) {
  constexpr bool kDecoded = Shared::kDecodes;
  const int lane = threadIdx.x % 32, group = warp / 4, first = group * 64;
  const uint32_t empty = ptx::remote_barrier(s.empty, lane % kNativeCluster);
  Worker<Shared::kStages> w{group, lane, first + warp % 4 * 16 + lane / 4, empty, {}, {}};
  typename Shared::Out out(s.out[group], &s.c_there[group], group);
  for (Turn<kTiles> turn;; turn.advance()) {
    ptx::barrier_wait(&s.tiles_full[turn.slot], turn.parity);
    const Tile t = s.tiles[turn.slot];
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(&s.tiles_empty[turn.slot]);
    if (t.group == kNoMoreTiles) break;
    if (t.row + first >= t.row_end || t.col >= p.n) {
      skip_tile(s, w, t);
      continue;
    }
    float sums[Shared::kTileN / 2] = {};
    const bool pieces = Shared::kPieces && p.pieces;
    if (!kDecoded && !pieces) out.begin(p, t, first);
    if constexpr (kMode == Promotion::none) {
      multiply_tile<kA, kB>(p, s, w, t, sums);
    } else {
      multiply_tile_in_parts<kMode, kA, kB>(p, s, w, t, sums);
    }
    float factor = 1.0f;
    if (!Shared::kScales && t.k < t.k_end) {
      if (!kDecoded || p.a_scale) factor = *p.a_scale;
      if (!kDecoded || p.b_scale) factor = __fmul_rn(factor, p.b_scale[p.depth ? 0 : t.group]);
    }
    Finish finish = make_finish(p, t, factor);
    if (pieces) {
      store_pieces(make_epilogue(p, t, finish), t, factor, sums, first);
      continue;
    }
    if constexpr (kDecoded) {
      const Epilogue e = make_epilogue(p, t, finish);
      finish.alpha = full_alpha(e, row_alpha(e, 0), 0);
      if (p.d_type == DType::f32) {
        if (finish.bias || p.c) {
          store_floats<true>(p, t, finish, sums, first);
        } else {
          store_floats<false>(p, t, finish, sums, first);
        }
        continue;
      }
    }
    out.store(p, finish, sums, t, first);
  }
  out.end();
}

template <Promotion kMode, bool kTall, ptx::Element kA, ptx::Element kB, bool kWide, int kDecoders>
__global__ void __launch_bounds__(NativeShared<kMode, kTall, kWide, kDecoders>::kThreads, 1)
    grouped_kernel(const __grid_constant__ NativeArgs p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  DIPTYCH_DYNAMIC_SHARED_ALIGNED(memory, 1024);
  using Shared = NativeShared<kMode, kTall, kWide, kDecoders>;
  constexpr bool kDecodes = Shared::kDecodes;
  constexpr int kProducts = Shared::kProducts;
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
  const int rank = ptx::cluster_rank();
  if (warp == 2) {
    *reinterpret_cast<uint4*>(s.zeros + threadIdx.x % 32 * 32) = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(s.zeros + threadIdx.x % 32 * 32 + 16) = make_uint4(0, 0, 0, 0);
    ptx::bulk_sees_stores();
  }
  if (threadIdx.x == 32) {
    ptx::prefetch(&p.a);
    ptx::prefetch(&p.b);
    for (int i = 0; i < Shared::kStages; ++i) {
      ptx::barrier_init(&s.full[i], 1);
      ptx::barrier_init(&s.empty[i], kProducts / 32 * kNativeCluster);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::barrier_init(&s.scales_full[i], 32);
      ptx::barrier_init(&s.scales_empty[i], kProducts);
    }
    for (int i = 0; i < Shared::kWarpgroups; ++i) ptx::barrier_init(&s.c_there[i], 1);
    for (int i = 0; i < kTiles; ++i) {
      ptx::barrier_init(&s.tiles_full[i], 1);
      ptx::barrier_init(&s.tiles_empty[i], kProducts / 32);
    }
    ptx::barrier_init_fence();
  }
  if constexpr (!kDecodes) {
    ptx::wait_for_grid_before();
    ptx::let_next_grid_start();
  }
  if (warp == 0) {
    fill_table<Shared::kTile>(p, s.table, threadIdx.x);
    __syncwarp();
    if (kDecodes) fill_units(p, s.table, threadIdx.x);
  }
  ptx::cluster_sync();
  if (warp >= kProducts / 32) {
    ptx::give_registers<Shared::kMany ? 96 : kDecodes ? 88 : kTall ? 32 : 40>();
    const typename Shared::Walker walk(p, s.table, rank);
    if (warp == kProducts / 32) {
      fetch_operands(p, s, walk, rank);
    } else if (warp == kProducts / 32 + 1) {
      announce_tiles(s, walk);
    } else if (Shared::kScales && warp == kProducts / 32 + 2) {
      fetch_scales(p, s, walk);
    }
    if constexpr (kDecodes) {
      if (warp >= (Shared::kThreads - kDecoders) / 32) {
        constexpr int kTeam = Shared::kMany ? 32 : kDecoders;
        const int team = 2 + (threadIdx.x - (Shared::kThreads - kDecoders)) / kTeam;
        decode_units(p, s.table, INT_MAX,
                     Team<kTeam>{static_cast<int>(threadIdx.x % kTeam), kDecodeBarrier + team, s.decode.ticket[team]});
      }
    }
  } else {
    if constexpr (kDecodes) {
      const int group = warp / 4;
      decode_units(p, s.table, p.units_ahead,
                   Team<kGroupThreads>{static_cast<int>(threadIdx.x % kGroupThreads), kDecodeBarrier + group,
                                       s.decode.ticket[group]});
    }
    ptx::take_registers<Shared::kMany || kTall ? 160 : kDecodes ? 208 : 232>();
    multiply_tiles<kMode, kA, kB>(p, s, warp);
  }
  ptx::cluster_sync();  // a thread block must not exit while its neighbour may still signal to it
#endif
}

template <Promotion kMode, bool kTall, ptx::Element kA, ptx::Element kB, bool kWide, int kDecoders = 0>
Status launch_native(const NativeArgs& p, const NativeLaunch& l, const Execution& exec) {
  static SharedGrant grant;
  using Shared = NativeShared<kMode, kTall, kWide, kDecoders>;
  static_assert(sizeof(Shared) <= kMaxShared);
  const auto kernel = grouped_kernel<kMode, kTall, kA, kB, kWide, kDecoders>;
  DIPTYCH_TRY(grant.raise(kernel, exec.device.index, sizeof(Shared)));
  return launch_clusters("grouped_gemm", kernel, l.blocks, kNativeCluster, Shared::kThreads, sizeof(Shared), exec,
                         !Shared::kDecodes, p);
}

template <Promotion kMode, ptx::Element kA, ptx::Element kB>
Status launch_native(const NativeArgs& p, const NativeLaunch& l, const Execution& exec) {
  if constexpr (kMode != Promotion::none) {
    if (l.tall) {
      return p.d_type == DType::f32 ? launch_native<kMode, true, kA, kB, true>(p, l, exec)
                                    : launch_native<kMode, true, kA, kB, false>(p, l, exec);
    }
  }
  return p.d_type == DType::f32 ? launch_native<kMode, false, kA, kB, true>(p, l, exec)
                                : launch_native<kMode, false, kA, kB, false>(p, l, exec);
}

template <Promotion kMode>
Status launch_native(const NativeArgs& p, const NativeLaunch& l, const Execution& exec) {
  constexpr auto k4 = ptx::Element::e4m3, k5 = ptx::Element::e5m2;
  if (l.a_e5m2) return l.b_e5m2 ? launch_native<kMode, k5, k5>(p, l, exec) : launch_native<kMode, k5, k4>(p, l, exec);
  return l.b_e5m2 ? launch_native<kMode, k4, k5>(p, l, exec) : launch_native<kMode, k4, k4>(p, l, exec);
}

}  // namespace diptych::cuda
