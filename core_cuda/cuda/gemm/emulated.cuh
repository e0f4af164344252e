// The tile product of the emulated kernels: decodes FP8 and E2M1 to bfloat16 in shared memory, multiplies with mma.sync
// and sums in float32.
//
// E8M0 and E4M3 scales are multiplied into the operands, float32 block scales into each block's partial sum, per-tensor
// scales and amaxes in the epilogue (NUMERICS 6). One thread block owns 128 x 128 of D and walks all of k: no split, no
// atomics.
#pragma once

#include "cuda/base/launch.cuh"
#include "cuda/gemm/emulated_operand.cuh"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/ptx/mma.cuh"

namespace diptych::cuda {

constexpr int kEmulatedShared = 2 * 2 * kTileBytes;  // two stages of A and B
constexpr int kTileRowsTogether = 8;                 // rows of tiles that share B's tiles in L2

struct TileAt {
  int m0, n0;
  int k0, tiles_k;  // tiles of kTileK from k0 on; k0 begins a block of float32 scales
  Reach reach;      // with kConfined
};

// Returns the tile of a thread block as its indices along m and n.
__device__ __forceinline__ int2 tile_of_block(int block, int tiles_m, int tiles_n) {
  const int together = kTileRowsTogether * tiles_n, band = block / together, in_band = block % together;
  const int rows = min(tiles_m - band * kTileRowsTogether, kTileRowsTogether);
  return make_int2(band * kTileRowsTogether + in_band % rows, in_band / rows);
}

// Block scales need a second set of sums, hence smaller warp tiles: 64 x 32 by eight warps, else 64 x 64 by four.
template <bool kBlockScales>
struct TileShape {
  static constexpr int kThreads = kBlockScales ? 256 : 128;
  static constexpr int kCols = kBlockScales ? 32 : 64;      // columns of D for a warp, which has 64 rows
  static constexpr int kPerThread = kFragments / kThreads;  // fragments of each operand's tile
  using Sums = float[4][kCols / 8][4];                      // [m16][n8][registers of d]
};

// sums += a @ b.T over the 64 k of one stage; row and col are this warp's corner in the tiles.
template <int kN8>
__device__ __forceinline__ void multiply(float (&sums)[4][kN8][4], const unsigned char* a, const unsigned char* b,
                                         int row, int col) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int kk = 0; kk < kTileK / 16; ++kk) {
    uint32_t fa[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::ldmatrix_x4(fa[i], a + swizzled(row + i * 16 + lane % 16, kk * 2 + lane / 16));
    }
#pragma unroll
    for (int j = 0; j < kN8; j += 2) {  // fb[0] and fb[1] belong to j, fb[2] and fb[3] to j + 1
      uint32_t fb[4];
      ptx::ldmatrix_x4(fb, b + swizzled(col + j * 8 + lane % 8 + lane / 16 * 8, kk * 2 + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::mma_bf16(sums[i][j], fa[i], fb[0], fb[1]);
        ptx::mma_bf16(sums[i][j + 1], fa[i], fb[2], fb[3]);
      }
    }
  }
}

// Computes D's tile at `at` and writes those of its rows and columns that exist. kLean: computes addresses anew in each
// step, where registers are too few to keep them.
template <bool kBlockScales, Layout kA, Layout kB, bool kConfined, bool kLean>
__device__ __forceinline__ void product_tile(const Operand& a, const Operand& b, const Epilogue& e, const TileAt& at,
                                             int period, unsigned char* shared) {
  using S = TileShape<kBlockScales>;
  constexpr int kN8 = S::kCols / 8;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int warp_row = warp / (kTileOuter / S::kCols) * 64, warp_col = warp % (kTileOuter / S::kCols) * S::kCols;
  // This thread's first element of D: acc[i][j][r] is at row + i * 16 + r / 2 * 8 and col + j * 8 + r % 2.
  const int row = at.m0 + warp_row + lane / 4, col = at.n0 + warp_col + lane % 4 * 2;

  typename S::Sums acc = {};
  typename S::Sums part = {};  // kBlockScales: the current block's sums
  float sa[8], sb[2 * kN8];    // kBlockScales: the current block's scales for this thread's rows and columns

  // Step t multiplies stage t and fills stage t + 1 from memory, whose latency the products hide.
  for (int t = -1; t < at.tiles_k; ++t) {
    unsigned char* now = shared + (t & 1) * 2 * kTileBytes;
    unsigned char* next = shared + (~t & 1) * 2 * kTileBytes;
    const bool more = t + 1 < at.tiles_k;
    const int k_next = at.k0 + (t + 1) * kTileK;
    int thread = tid, corner_row = warp_row, corner_col = warp_col;
    if constexpr (kLean) asm volatile("" : "+r"(thread), "+r"(corner_row), "+r"(corner_col));
    Fragment fa[S::kPerThread], fb[S::kPerThread];
    if (more) {
#pragma unroll
      for (int u = 0; u < S::kPerThread; ++u) {
        fa[u] = load_fragment<kA, kConfined>(a, at.m0, k_next, thread + u * S::kThreads, at.reach);
        fb[u] = load_fragment<kB, kConfined>(b, at.n0, k_next, thread + u * S::kThreads, at.reach);
      }
    }
    if (t >= 0) {
      if constexpr (kBlockScales) {
        if (t % period == 0) {
#pragma unroll
          for (int i = 0; i < 8; ++i) sa[i] = partial_scale(a, row + i * 8, at.k0 + t * kTileK);
#pragma unroll
          for (int j = 0; j < 2 * kN8; ++j) sb[j] = partial_scale(b, col + j / 2 * 8 + j % 2, at.k0 + t * kTileK);
        }
        multiply(part, now, now + kTileBytes, corner_row, corner_col);
        if ((t + 1) % period == 0 || !more) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < kN8; ++j) {
#pragma unroll
              for (int r = 0; r < 4; ++r) {
                const float s = __fmul_rn(sa[i * 2 + r / 2], sb[j * 2 + r % 2]);
                acc[i][j][r] = __fadd_rn(acc[i][j][r], __fmul_rn(part[i][j][r], s));
                part[i][j][r] = 0.0f;
              }
            }
          }
        }
      } else {
        multiply(acc, now, now + kTileBytes, corner_row, corner_col);
      }
    }
    if (more) {
      const bool cut = kConfined && (k_next < at.reach.begin || k_next + kTileK > at.reach.end);
#pragma unroll
      for (int u = 0; u < S::kPerThread; ++u) {
        if (cut) {
          confine<kA>(a, fa[u], k_next, thread + u * S::kThreads, at.reach);
          confine<kB>(b, fb[u], k_next, thread + u * S::kThreads, at.reach);
        }
        store_fragment<kA>(a, fa[u], next, thread + u * S::kThreads);
        store_fragment<kB>(b, fb[u], next + kTileBytes, thread + u * S::kThreads);
      }
    }
    __syncthreads();
  }

  float factor = 1.0f;
  if (!kBlockScales && at.tiles_k > 0) factor = __fmul_rn(partial_scale(a, 0, 0), partial_scale(b, 0, 0));
  float alpha[8];  // alpha of this thread's rows
#pragma unroll
  for (int i = 0; i < 8; ++i) alpha[i] = row + i * 8 < e.m ? row_alpha(e, row + i * 8) : 0.0f;
#pragma unroll
  for (int j = 0; j < kN8; ++j) {
    const int c = col + j * 8;
    float bias[2] = {0.0f, 0.0f};
    if (e.bias) {
      if (c < e.n) bias[0] = load_as_float(e.bias, e.bias_type, c);
      if (c + 1 < e.n) bias[1] = load_as_float(e.bias, e.bias_type, c + 1);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* r = acc[i / 2][j] + i % 2 * 2;
      finish_pair(e, row + i * 8, c, alpha[i], __fmul_rn(r[0], factor), __fmul_rn(r[1], factor), bias[0], bias[1]);
    }
  }
}

// Returns how many k tiles lie between two promotions of the partial sums; 0 if no operand has float32 block scales.
inline int promotion_period(const Operand& a, const Operand& b) {
  int k_shift = 62;
  for (const Operand* o : {&a, &b}) {
    if (o->kind == ScaleKind::block && o->k_shift < k_shift) k_shift = o->k_shift;
  }
  return k_shift < 62 ? static_cast<int>((int64_t{1} << k_shift) / kTileK) : 0;
}

}  // namespace diptych::cuda
