// Grouped FP8 products on Hopper's tensor cores: D tiles of 256 x 128, persistent thread blocks.
//
// Twelve warps. Two warpgroups multiply: block b of 64 rows belongs to warpgroup b % 2, and each takes its two blocks
// in turn, so that one promotes partial sums while the other's products run. The third warpgroup feeds them: one warp
// asks the copy engine for 256 x 128 bytes of A and 128 x 128 of B, four stages ahead; three warps gather block scales,
// four k blocks at a time. Two thread blocks of a cluster stand side by side along N and fetch half of A's tile each,
// for both.
//
// A tile of A may reach past its group: those rows' sums are never stored. Rows past the tensor and k past its end
// arrive as zeros.
#pragma once

#include "cuda/device.h"
#include "cuda/grouped/native_store.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace diptych::cuda {

constexpr int kStages = 4, kChunks = 3, kChunkK = 4;  // a chunk: the scales of four k blocks
constexpr int kProducts = 2 * 128, kNativeThreads = kProducts + 128;
constexpr int kScaleThreads = 96;
constexpr int kABytes = kNativeTileM * kNativeTileK, kBBytes = kNativeTileN * kNativeTileK;
constexpr int kHalfA = kABytes / 2, kBlockBytes = 64 * kNativeTileK;

template <Promotion kMode>
struct Scales {
  static constexpr bool kAny = kMode == Promotion::columns || kMode == Promotion::full;
  static constexpr int kB = kMode == Promotion::full ? kNativeTileN : 1;
  // Eight floats more: rows of one chunk then start in other banks.
  float a[kAny ? kChunks : 1][kChunkK][kAny ? kNativeTileM + 8 : 1];
  float b[kAny ? kChunks : 1][kChunkK][kB + 8];
};

template <Promotion kMode>
struct alignas(1024) NativeShared {
  unsigned char a[kStages][kABytes];
  unsigned char b[kStages][kBBytes];
  unsigned char zeros[1024];
  Scales<kMode> scales;
  uint64_t full[kStages], empty[kStages];
  uint64_t scales_full[kChunks], scales_empty[kChunks];
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

template <Promotion kMode>
__device__ __forceinline__ void fetch_operands(const NativeArgs& p, NativeShared<kMode>& s, Walker walk, int rank,
                                               int ranks) {
  const bool leader = threadIdx.x % 32 == 0;
  Turn<kStages> turn;
  for (Tile t; walk.next(t);) {
    if (leader) {
      for (int k = t.k; k < t.k_end; k += kNativeTileK, turn.advance()) {
        unsigned char* a = s.a[turn.slot];
        uint64_t* full = &s.full[turn.slot];
        ptx::barrier_wait(&s.empty[turn.slot], turn.parity ^ 1);
        ptx::barrier_arrive_expect(full, kABytes + kBBytes);
        if (ranks == 1) {
          ptx::copy_box(a, &p.a, full, k, t.row);
          ptx::copy_box(a + kHalfA, &p.a, full, k, t.row + kNativeTileM / 2);
        } else {
          ptx::copy_box_to(3, a + rank * kHalfA, &p.a, full, k, t.row + rank * (kNativeTileM / 2));
        }
        ptx::copy_box(s.b[turn.slot], &p.b, full, k, t.col, p.depth ? 0 : t.group);
      }
    }
    __syncwarp();
  }
}

template <Promotion kMode>
__device__ __forceinline__ void fetch_scales(const NativeArgs& p, NativeShared<kMode>& s, Walker walk, int thread) {
  constexpr int kB = Scales<kMode>::kB;
  const int outer = p.depth ? p.m : p.rows;
  Turn<kChunks> turn;
  for (Tile t; walk.next(t);) {
    const int blocks = t.blocks(), k_block = t.k / kNativeTileK;
    const float* b_scale = p.b_scale + (p.depth ? 0 : max(t.group, 0) * p.b_scale_stack);
    for (int block = 0; block < blocks; block += kChunkK, turn.advance()) {
      ptx::barrier_wait(&s.scales_empty[turn.slot], turn.parity ^ 1);
      for (int i = thread; i < kNativeTileM * kChunkK; i += kScaleThreads) {
        const int row = i / kChunkK, j = i % kChunkK, at = min(t.row + row, outer - 1) >> p.a_shift;
        ptx::copy_async4(&s.scales.a[turn.slot][j][row],
                         p.a_scale + static_cast<int64_t>(at) * p.scale_k + k_block + block + j, block + j < blocks);
      }
      for (int i = thread; i < kB * kChunkK; i += kScaleThreads) {
        const int col = i / kChunkK, j = i % kChunkK, at = min(t.col + col, p.n - 1) >> p.b_shift;
        ptx::copy_async4(&s.scales.b[turn.slot][j][col],
                         b_scale + static_cast<int64_t>(at) * p.scale_k + k_block + block + j, block + j < blocks);
      }
      ptx::barrier_arrive_after_copies(&s.scales_full[turn.slot]);
    }
    __syncwarp();
  }
}

// sums = sums + part * scale: `row` holds those of this thread's rows and `b` those of its columns, eight apart (full).
template <Promotion kMode>
__device__ __forceinline__ void promote(float (&sums)[64], const float (&part)[64], const float (&row)[2],
                                        const float* b) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    if constexpr (kMode == Promotion::full) {
      const float2 col = *reinterpret_cast<const float2*>(b + j * 8);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        sums[j * 4 + r] = __fmaf_rn(part[j * 4 + r], __fmul_rn(row[r / 2], r % 2 ? col.y : col.x), sums[j * 4 + r]);
      }
    } else if constexpr (kMode == Promotion::columns) {
#pragma unroll
      for (int r = 0; r < 4; ++r) sums[j * 4 + r] = __fmaf_rn(part[j * 4 + r], row[r / 2], sums[j * 4 + r]);
    } else {
#pragma unroll
      for (int r = 0; r < 4; ++r) sums[j * 4 + r] = __fadd_rn(sums[j * 4 + r], part[j * 4 + r]);
    }
  }
}

// Up to 128 k of one block of 64 rows, `left` of them in multiples of 32; `add`: to what d holds. What lies past them
// may be another group's, so that zeros are multiplied there: no branch may part the products.
template <bool kA5, bool kB5>
__device__ __forceinline__ void multiply_block(float (&d)[64], uint32_t a, uint32_t b, bool add, uint64_t zeros = 0,
                                               int left = kNativeTileK) {
  ptx::products_touch(d);
  ptx::products_begin();
  const uint64_t ma = ptx::matrix(a), mb = ptx::matrix(b);
#pragma unroll
  for (int i = 0; i < kNativeTileK / 32; ++i) {
    const bool inside = i * 32 < left;
    ptx::product<kA5, kB5>(d, inside ? ma + i * 2 : zeros, inside ? mb + i * 2 : zeros, add || i > 0);
  }
  ptx::products_commit();
  ptx::products_touch(d);
}

// What a warpgroup of products keeps from tile to tile.
struct Worker {
  int group, ranks, lane;
  int row;  // of this thread in the first block of 64; the second lies 128 below
  Turn<kStages> stage;
  Turn<kChunks> chunk;

  __device__ __forceinline__ void release(uint64_t* empty) const {
    if (lane < ranks) ptx::barrier_arrive_at(empty, lane);
  }
};

// sums = A @ B.T over the tile's k, for the first kBlocks of the warpgroup's two blocks of 64 rows.
template <Promotion kMode, bool kA5, bool kB5, int kBlocks>
__device__ __forceinline__ void multiply_tile(const NativeArgs& p, NativeShared<kMode>& s, Worker& w, const Tile& t,
                                              float (&sums)[2][64]) {
  constexpr bool kScales = Scales<kMode>::kAny;
  const int blocks = t.blocks();
  const uint32_t a0 = ptx::shared_address(s.a[0]) + w.group * kBlockBytes, b0 = ptx::shared_address(s.b[0]);
  const uint64_t zeros = kScales ? 0 : ptx::repeated_matrix(ptx::shared_address(s.zeros));
  for (int block = 0; block < blocks; ++block) {
    const uint32_t a = a0 + w.stage.slot * kABytes, b = b0 + w.stage.slot * kBBytes;
    // Blocks of scales begin where groups do, and past the last group's end there are zeros in the tensor.
    const int left = kScales || !p.depth ? kNativeTileK : t.k_end - t.k - block * kNativeTileK;
    if (kScales && block % kChunkK == 0) ptx::barrier_wait(&s.scales_full[w.chunk.slot], w.chunk.parity);
    ptx::barrier_wait(&s.full[w.stage.slot], w.stage.parity);
    if constexpr (kMode == Promotion::none) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) multiply_block<kA5, kB5>(sums[i], a + i * kHalfA, b, true, zeros, left);
      ptx::products_wait<kBlocks>();
      if (block > 0) w.release(&s.empty[(w.stage.slot + kStages - 1) % kStages]);
    } else {
      const int chunk = kScales ? w.chunk.slot : 0, in_chunk = kScales ? block % kChunkK : 0;
      const float* a_scale = &s.scales.a[chunk][in_chunk][kScales ? w.row : 0];
      const float* b_scale = &s.scales.b[chunk][in_chunk][kMode == Promotion::full ? w.lane % 4 * 2 : 0];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float part[64], row[2] = {1.0f, 1.0f};
        if (p.turns) ptx::named_sync(1 + w.group, kProducts);
        if (i < kBlocks) multiply_block<kA5, kB5>(part, a + i * kHalfA, b, false, zeros, left);
        if (p.turns) ptx::named_arrive(2 - w.group, kProducts);
        if (i < kBlocks) {
          if (kScales) row[0] = a_scale[i * 128], row[1] = a_scale[i * 128 + 8];
          if (kMode == Promotion::columns) row[0] = __fmul_rn(row[0], *b_scale), row[1] = __fmul_rn(row[1], *b_scale);
          ptx::products_wait<0>();
          ptx::products_touch(part);
        }
        if (i == 1) w.release(&s.empty[w.stage.slot]);
        if (i < kBlocks) promote<kMode>(sums[i], part, row, b_scale);
      }
      if (kScales && (in_chunk == kChunkK - 1 || block == blocks - 1)) {
        __syncwarp();
        if (w.lane == 0) ptx::barrier_arrive(&s.scales_empty[w.chunk.slot]);
        w.chunk.advance();
      }
    }
    w.stage.advance();
  }
  if constexpr (kMode == Promotion::none) {
    ptx::products_wait<0>();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) ptx::products_touch(sums[i]);
    if (blocks > 0) w.release(&s.empty[(w.stage.slot + kStages - 1) % kStages]);
  }
}

template <Promotion kMode, bool kA5, bool kB5>
__device__ __forceinline__ void multiply_tiles(const NativeArgs& p, NativeShared<kMode>& s, Walker walk, int warp,
                                               int ranks) {
  const int lane = threadIdx.x % 32;
  Worker w{warp / 4, ranks, lane, warp / 4 * 64 + warp % 4 * 16 + lane / 4, {}, {}};
  for (Tile t; walk.next(t);) {
    float sums[2][64];
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[0][i] = sums[1][i] = 0.0f;
    const int rows = t.row_end - t.row - w.group * 64;  // those of the first block and below that exist
    if (rows > 128) {
      multiply_tile<kMode, kA5, kB5, 2>(p, s, w, t, sums);
    } else if (rows > 0) {
      multiply_tile<kMode, kA5, kB5, 1>(p, s, w, t, sums);
    } else {
      multiply_tile<kMode, kA5, kB5, 0>(p, s, w, t, sums);
    }
    float factor = 1.0f;
    if (!Scales<kMode>::kAny && t.k < t.k_end) {
      factor = __fmul_rn(__ldg(p.a_scale), __ldg(p.b_scale + (p.depth ? 0 : t.group)));
    }
    const Finish f = make_finish(p, t, factor);
    if (p.d_type == DType::f32) {
      store_tile<true>(p, f, sums, t, w.row, lane);
    } else {
      store_tile<false>(p, f, sums, t, w.row, lane);
    }
  }
}

template <Promotion kMode, bool kA5, bool kB5>
__global__ void __launch_bounds__(kNativeThreads, 1) grouped_kernel(const __grid_constant__ NativeArgs p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  NativeShared<kMode>& s = *reinterpret_cast<NativeShared<kMode>*>(memory);
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
  const int rank = ptx::cluster_rank(), ranks = ptx::cluster_size();
  if (warp == 0) fill_table(p, s.table, threadIdx.x);
  if (warp == 2) {
    *reinterpret_cast<uint4*>(s.zeros + threadIdx.x % 32 * 32) = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(s.zeros + threadIdx.x % 32 * 32 + 16) = make_uint4(0, 0, 0, 0);
    ptx::products_see_stores();
  }
  if (threadIdx.x == 32) {
    ptx::prefetch(&p.a);
    ptx::prefetch(&p.b);
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(&s.full[i], 1);
      ptx::barrier_init(&s.empty[i], kProducts / 32 * ranks);
    }
    for (int i = 0; i < kChunks; ++i) {
      ptx::barrier_init(&s.scales_full[i], kScaleThreads);
      ptx::barrier_init(&s.scales_empty[i], kProducts / 32);
    }
    ptx::barrier_init_fence();
  }
  ptx::cluster_sync();
  const Walker walk(p, s.table, rank, ranks);
  if (warp >= kProducts / 32) {
    ptx::give_registers<40>();
    if (warp == kProducts / 32) {
      fetch_operands<kMode>(p, s, walk, rank, ranks);
    } else if (Scales<kMode>::kAny) {
      fetch_scales<kMode>(p, s, walk, threadIdx.x - kProducts - 32);
    }
  } else {
    ptx::take_registers<232>();
    if (p.turns && warp >= 4) ptx::named_arrive(1, kProducts);  // the first turn is warpgroup 0's
    multiply_tiles<kMode, kA5, kB5>(p, s, walk, warp, ranks);
  }
  ptx::cluster_sync();  // a thread block stays while its neighbour may still signal to it
#endif
}

template <Promotion kMode, bool kA5, bool kB5>
Status launch_native(const NativeArgs& p, const NativeLaunch& l, const Execution& exec) {
  static SharedGrant grant;
  constexpr int kBytes = sizeof(NativeShared<kMode>);
  static_assert(kBytes <= 232448, "what a thread block of sm_90 may have");
  DIPTYCH_TRY(grant.raise(grouped_kernel<kMode, kA5, kB5>, exec.device.index, kBytes));
  return launch_clusters("grouped_gemm", grouped_kernel<kMode, kA5, kB5>, l.blocks, l.cluster, kNativeThreads, kBytes,
                         exec.stream, p);
}

template <Promotion kMode>
Status launch_native(const NativeArgs& p, const NativeLaunch& l, const Execution& exec) {
  if (l.a_e5m2)
    return l.b_e5m2 ? launch_native<kMode, true, true>(p, l, exec) : launch_native<kMode, true, false>(p, l, exec);
  return l.b_e5m2 ? launch_native<kMode, false, true>(p, l, exec) : launch_native<kMode, false, false>(p, l, exec);
}

}  // namespace diptych::cuda
