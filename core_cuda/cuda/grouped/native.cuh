// Grouped FP8 products on Hopper's tensor cores: D tiles of 128 rows and 192 or 256 columns, persistent thread blocks.
//
// Twelve warps. Two warpgroups multiply 64 rows each: one promotes partial sums while the other's products run. The
// third warpgroup feeds them: one warp asks the copy engine for 128 k of A's and B's rows, several stages ahead; one
// gathers block scales, four k blocks at a time. Two thread blocks of a cluster fetch half of the tile that they share
// each, for both.
//
// Large products draw all the power that the chip may have, which then lowers its clock: what saves instructions and
// traffic is what makes them faster. Wide products read A less often; 192 columns of partial sums and sums are what
// registers hold.
//
// A tile of A may reach past its group: those rows' sums are never stored. Rows past the tensor and k past its end
// arrive as zeros.
#pragma once

#include "cuda/device.h"
#include "cuda/grouped/native_store.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace diptych::cuda {

constexpr int kChunks = 2, kChunkK = 4;  // a chunk: the scales of four k blocks
constexpr int kProducts = 2 * kGroupThreads, kNativeThreads = kProducts + 128;
constexpr int kMaxShared = 232448;  // bytes that a thread block of sm_90 may have

// Scales of a chunk: four neighbours of each row of A together, a line of B's for each k block; columns: of the two
// blocks that a tile may touch.
template <Promotion kMode>
struct Scales {
  static constexpr bool kAny = kMode == Promotion::columns || kMode == Promotion::full;
  static constexpr int kB = kMode == Promotion::full ? native_tile_n(kMode) : 2;
  float4 a[kAny ? kChunks : 1][kAny ? kNativeTileM : 1];
  float b[kAny ? kChunks : 1][kChunkK][kB];
};

template <Promotion kMode, bool kWide>
struct alignas(1024) NativeShared {
  static constexpr int kTileN = native_tile_n(kMode);
  static constexpr int kABytes = kNativeTileM * kNativeTileK, kBBytes = kTileN * kNativeTileK;
  static constexpr int kStageBytes = kABytes + kBBytes;
  using Out = cuda::Out<kWide, !Scales<kMode>::kAny, kTileN>;
  using Walker = cuda::Walker<kTileN>;
  static constexpr int kRest = 2 * Out::kBytes + 1024 + sizeof(Scales<kMode>) + sizeof(Table) + 256;
  static constexpr int kStages = (kMaxShared - kRest) / kStageBytes;
  static_assert(kStages >= 3, "too few to hide the way from memory");

  unsigned char operands[kStages][kStageBytes];  // of A, then of B
  unsigned char out[2][Out::kBytes];
  unsigned char zeros[1024];
  Scales<kMode> scales;
  uint64_t full[kStages], empty[kStages];
  uint64_t scales_full[kChunks], scales_empty[kChunks];
  uint64_t c_there[2];
  Table table;
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

template <typename Shared>
__device__ __forceinline__ void fetch_operands(const NativeArgs& p, Shared& s, typename Shared::Walker walk, int rank) {
  constexpr uint32_t kBoth = 3;
  constexpr int kHalfA = Shared::kABytes / 2, kHalfB = Shared::kBBytes / 2;
  constexpr int kHalfM = kNativeTileM / 2, kHalfN = Shared::kTileN / 2;
  const bool leader = threadIdx.x % 32 == 0;
  Turn<Shared::kStages> turn;
  for (Tile t; walk.next(t);) {
    if (leader) {
      const int stack = p.depth ? 0 : t.group;
      for (int k = t.k; k < t.k_end; k += kNativeTileK, turn.advance()) {
        unsigned char *a = s.operands[turn.slot], *b = a + Shared::kABytes;
        uint64_t* full = &s.full[turn.slot];
        ptx::barrier_wait(&s.empty[turn.slot], turn.parity ^ 1);
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

// Four neighbours of a line of scales, `left` of which exist.
__device__ __forceinline__ void fetch_four(float4* to, const float* from, int left, bool whole) {
  if (whole) {
    ptx::copy_async16(to, from, true);
  } else {
#pragma unroll
    for (int j = 0; j < kChunkK; ++j) ptx::copy_async4(reinterpret_cast<float*>(to) + j, from + j, j < left);
  }
}

template <Promotion kMode, typename Shared>
__device__ __forceinline__ void fetch_scales(const NativeArgs& p, Shared& s, typename Shared::Walker walk) {
  constexpr int kB = Scales<kMode>::kB;
  const int outer = p.depth ? p.m : p.rows, lane = threadIdx.x % 32;
  Turn<kChunks> turn;
  for (Tile t; walk.next(t);) {
    const int blocks = t.blocks(), first = t.k / kNativeTileK;
    const float* b_scale = p.b_scale + (p.depth ? 0 : max(t.group, 0) * p.b_scale_stack);
    for (int block = 0; block < blocks; block += kChunkK, turn.advance()) {
      const int left = blocks - block;
      const bool whole = p.whole_scales && left >= kChunkK && first % kChunkK == 0;
      ptx::barrier_wait(&s.scales_empty[turn.slot], turn.parity ^ 1);
      for (int i = lane; i < kNativeTileM; i += 32) {
        const int at = min(t.row + i, outer - 1) >> p.a_shift;
        fetch_four(&s.scales.a[turn.slot][i], p.a_scale + static_cast<int64_t>(at) * p.scale_k + first + block, left,
                   whole);
      }
      for (int i = lane; i < kB * kChunkK; i += 32) {
        const int col = i / kChunkK, j = i % kChunkK, at = min((t.col >> p.b_shift) + col, (p.n - 1) >> p.b_shift);
        ptx::copy_async4(&s.scales.b[turn.slot][j][col],
                         b_scale + static_cast<int64_t>(at) * p.scale_k + first + block + j, j < left);
      }
      ptx::barrier_arrive_after_copies(&s.scales_full[turn.slot]);
    }
    __syncwarp();
  }
}

// sums = sums + part * scale: `row` holds those of this thread's rows; `b` (columns) of B's two blocks, the second of
// which begins after 64 columns if `early`, else after 128; (full) of this thread's columns, eight apart.
template <Promotion kMode, int kSums>
__device__ __forceinline__ void promote(float (&sums)[kSums], const float (&part)[kSums], const float (&row)[2],
                                        const float* b, bool early) {
  float scale[3][2];
  if constexpr (kMode == Promotion::columns) {
    static_assert(kSums == 96);
    const float2 both = *reinterpret_cast<const float2*>(b);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scale[0][h] = __fmul_rn(row[h], both.x), scale[2][h] = __fmul_rn(row[h], both.y);
      scale[1][h] = early ? scale[2][h] : scale[0][h];
    }
  }
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    if constexpr (kMode == Promotion::full) {
      const float2 col = *reinterpret_cast<const float2*>(b + j * 8);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        sums[j * 4 + r] = __fmaf_rn(part[j * 4 + r], __fmul_rn(row[r / 2], r % 2 ? col.y : col.x), sums[j * 4 + r]);
      }
    } else if constexpr (kMode == Promotion::columns) {
#pragma unroll
      for (int r = 0; r < 4; ++r) sums[j * 4 + r] = __fmaf_rn(part[j * 4 + r], scale[j / 8][r / 2], sums[j * 4 + r]);
    } else {
#pragma unroll
      for (int r = 0; r < 4; ++r) sums[j * 4 + r] = __fadd_rn(sums[j * 4 + r], part[j * 4 + r]);
    }
  }
}

// Up to 128 k of 64 rows, `left` of them in multiples of 32; `add`: to what d holds. What lies past them may be another
// group's, so that zeros are multiplied there: no branch may part the products.
template <bool kA5, bool kB5, int kSums>
__device__ __forceinline__ void multiply_block(float (&d)[kSums], uint32_t a, uint32_t b, bool add, uint32_t zeros,
                                               int left) {
  ptx::products_touch(d);
  ptx::products_begin();
#pragma unroll
  for (int i = 0; i < kNativeTileK / 32; ++i) {
    const bool inside = i * 32 < left;
    ptx::product<kA5, kB5>(d, inside ? ptx::matrix(a + i * 2) : ptx::repeated_matrix(zeros),
                           inside ? ptx::matrix(b + i * 2) : ptx::repeated_matrix(zeros), add || i > 0);
  }
  ptx::products_commit();
  ptx::products_touch(d);
}

// What a warpgroup of products keeps from tile to tile.
template <int kStages>
struct Worker {
  int group, lane;
  int row;  // of this thread in a tile; another lies eight below
  Turn<kStages> stage;
  Turn<kChunks> chunk;

  __device__ __forceinline__ void release(uint64_t* empty) const {
    if (lane < kNativeCluster) ptx::barrier_arrive_at(empty, lane);
  }
};

// sums = A @ B.T over the tile's k.
template <Promotion kMode, bool kA5, bool kB5, int kSums, typename Shared>
__device__ __forceinline__ void multiply_tile(const NativeArgs& p, Shared& s, Worker<Shared::kStages>& w, const Tile& t,
                                              float (&sums)[kSums]) {
  constexpr bool kScales = Scales<kMode>::kAny;
  const int blocks = t.blocks();
  const uint32_t a0 = ptx::matrix_address(s.operands[0]) + w.group * (Shared::kABytes / 32);
  const uint32_t b0 = ptx::matrix_address(s.operands[0]) + Shared::kABytes / 16, zeros = ptx::matrix_address(s.zeros);
  constexpr int kStage = Shared::kStageBytes / 16;
  // Blocks of scales begin where groups do, and past the last group's end there are zeros in the tensor.
  const bool cut = !kScales && p.depth;
  if constexpr (kMode == Promotion::none) {
    int held = 0;
    for (int block = 0; block < blocks; ++block) {
      const int slot = w.stage.slot, left = cut ? t.k_end - t.k - block * kNativeTileK : kNativeTileK;
      ptx::barrier_wait(&s.full[slot], w.stage.parity);
      multiply_block<kA5, kB5>(sums, a0 + slot * kStage, b0 + slot * kStage, true, zeros, left);
      ptx::products_wait<1>();
      if (block > 0) w.release(&s.empty[held]);
      held = slot;
      w.stage.advance();
    }
    ptx::products_wait<0>();
    ptx::products_touch(sums);
    if (blocks > 0) w.release(&s.empty[held]);
  } else {
    for (int block = 0; block < blocks; block += kChunkK) {
      if (kScales) ptx::barrier_wait(&s.scales_full[w.chunk.slot], w.chunk.parity);
      const float* a_scale = &s.scales.a[kScales ? w.chunk.slot : 0][kScales ? w.row : 0].x;
      const auto& b_scales = s.scales.b[kScales ? w.chunk.slot : 0];
#pragma unroll
      for (int j = 0; j < kChunkK; ++j) {
        if (block + j >= blocks) break;
        const int slot = w.stage.slot, left = cut ? t.k_end - t.k - (block + j) * kNativeTileK : kNativeTileK;
        ptx::barrier_wait(&s.full[slot], w.stage.parity);
        float part[kSums], row[2] = {1.0f, 1.0f};
        multiply_block<kA5, kB5>(part, a0 + slot * kStage, b0 + slot * kStage, false, zeros, left);
        if (kScales) row[0] = a_scale[j], row[1] = a_scale[8 * kChunkK + j];
        const float* b_scale = &b_scales[j][kMode == Promotion::full ? w.lane % 4 * 2 : 0];
        ptx::products_wait<0>();
        ptx::products_touch(part);
        w.release(&s.empty[slot]);
        promote<kMode>(sums, part, row, b_scale, t.col % 128 != 0);
        w.stage.advance();
      }
      if (kScales) {
        ptx::barrier_arrive(&s.scales_empty[w.chunk.slot]);
        w.chunk.advance();
      }
    }
  }
}

// Without anything to store: it lets go of what comes.
template <Promotion kMode, typename Shared>
__device__ __forceinline__ void skip_tile(Shared& s, Worker<Shared::kStages>& w, int blocks) {
  for (int block = 0; block < blocks; ++block) {
    ptx::barrier_wait(&s.full[w.stage.slot], w.stage.parity);
    __syncwarp();  // a lane that lags behind the release could miss a phase
    w.release(&s.empty[w.stage.slot]);
    w.stage.advance();
    if (Scales<kMode>::kAny && (block % kChunkK == kChunkK - 1 || block == blocks - 1)) {
      ptx::barrier_wait(&s.scales_full[w.chunk.slot], w.chunk.parity);
      ptx::barrier_arrive(&s.scales_empty[w.chunk.slot]);
      w.chunk.advance();
    }
  }
}

template <Promotion kMode, bool kA5, bool kB5, typename Shared>
__device__ __forceinline__ void multiply_tiles(const NativeArgs& p, Shared& s, typename Shared::Walker walk, int warp) {
  const int lane = threadIdx.x % 32, group = warp / 4, first = group * 64;
  Worker<Shared::kStages> w{group, lane, first + warp % 4 * 16 + lane / 4, {}, {}};
  typename Shared::Out out(s.out[group], &s.c_there[group], group);
  for (Tile t; walk.next(t);) {
    if (t.row + first >= t.row_end || t.col >= p.n) {
      skip_tile<kMode>(s, w, t.blocks());
      continue;
    }
    float sums[Shared::kTileN / 2] = {};
    out.begin(p, t, first);
    multiply_tile<kMode, kA5, kB5>(p, s, w, t, sums);
    float factor = 1.0f;
    if (!Scales<kMode>::kAny && t.k < t.k_end) {
      factor = __fmul_rn(__ldg(p.a_scale), __ldg(p.b_scale + (p.depth ? 0 : t.group)));
    }
    out.store(p, make_finish(p, t, factor), sums, t, first);
  }
  out.end();
}

template <Promotion kMode, bool kA5, bool kB5, bool kWide>
__global__ void __launch_bounds__(kNativeThreads, 1) grouped_kernel(const __grid_constant__ NativeArgs p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  DIPTYCH_DYNAMIC_SHARED_ALIGNED(memory, 1024);
  using Shared = NativeShared<kMode, kWide>;
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
  const int rank = ptx::cluster_rank();
  if (warp == 0) fill_table(p, s.table, threadIdx.x);
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
    for (int i = 0; i < kChunks; ++i) {
      ptx::barrier_init(&s.scales_full[i], 32);
      ptx::barrier_init(&s.scales_empty[i], kProducts);
    }
    for (int i = 0; i < 2; ++i) ptx::barrier_init(&s.c_there[i], 1);
    ptx::barrier_init_fence();
  }
  ptx::cluster_sync();
  const typename Shared::Walker walk(p, s.table, rank);
  if (warp >= kProducts / 32) {
    ptx::give_registers<40>();
    if (warp == kProducts / 32) {
      fetch_operands(p, s, walk, rank);
    } else if (Scales<kMode>::kAny && warp == kProducts / 32 + 1) {
      fetch_scales<kMode>(p, s, walk);
    }
  } else {
    ptx::take_registers<232>();
    multiply_tiles<kMode, kA5, kB5>(p, s, walk, warp);
  }
  ptx::cluster_sync();  // a thread block stays while its neighbour may still signal to it
#endif
}

template <Promotion kMode, bool kA5, bool kB5, bool kWide>
Status launch_native(const NativeArgs& p, const NativeLaunch& l, const Execution& exec) {
  static SharedGrant grant;
  constexpr int kBytes = sizeof(NativeShared<kMode, kWide>);
  static_assert(kBytes <= kMaxShared);
  DIPTYCH_TRY(grant.raise(grouped_kernel<kMode, kA5, kB5, kWide>, exec.device.index, kBytes));
  return launch_clusters("grouped_gemm", grouped_kernel<kMode, kA5, kB5, kWide>, l.blocks, kNativeCluster,
                         kNativeThreads, kBytes, exec.stream, p);
}

template <Promotion kMode, bool kA5, bool kB5>
Status launch_native(const NativeArgs& p, const NativeLaunch& l, const Execution& exec) {
  return p.d_type == DType::f32 ? launch_native<kMode, kA5, kB5, true>(p, l, exec)
                                : launch_native<kMode, kA5, kB5, false>(p, l, exec);
}

template <Promotion kMode>
Status launch_native(const NativeArgs& p, const NativeLaunch& l, const Execution& exec) {
  if (l.a_e5m2)
    return l.b_e5m2 ? launch_native<kMode, true, true>(p, l, exec) : launch_native<kMode, true, false>(p, l, exec);
  return l.b_e5m2 ? launch_native<kMode, false, true>(p, l, exec) : launch_native<kMode, false, false>(p, l, exec);
}

}  // namespace diptych::cuda
