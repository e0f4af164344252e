// Any pair of formats, any shape, any alignment: FP8 and E2M1 decoded to bfloat16 in shared memory, mma.sync, float32
// sums.
//
// E8M0 and E4M3 scales enter the operands, float32 block scales the block's partial sum, per-tensor scales and amaxes
// the epilogue (NUMERICS 6). One thread block owns 128 x 128 of D and walks all of k: no split, no atomics.
#include <atomic>
#include <bit>

#include "cuda/gemm/emulated_operand.cuh"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx/mma.cuh"

namespace diptych::cuda {
namespace {

constexpr int kSharedBytes = 2 * 2 * kTileBytes;  // two stages of A and B
constexpr int kGroup = 8;                         // tile rows that share B's tiles in L2

struct GemmKernelArgs {
  Operand a, b;  // outer is m for a, n for b
  Epilogue e;
  int k, tiles_k;
  int tiles_m, tiles_n;
  int period;  // k tiles between two promotions of the partial sums; block scales only
};

// Block scales need a second set of sums, hence smaller warp tiles: 64 x 32 by eight warps, else 64 x 64 by four.
template <bool kBlockScales>
struct Shape {
  static constexpr int kThreads = kBlockScales ? 256 : 128;
  static constexpr int kCols = kBlockScales ? 32 : 64;      // of D for a warp, beside 64 rows
  static constexpr int kPerThread = kFragments / kThreads;  // of each operand's tile
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
    for (int j = 0; j < kN8; j += 2) {  // two n8 at a time: registers 0, 1 and 2, 3
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

template <bool kBlockScales, Layout kA, Layout kB>
__global__ void __launch_bounds__(Shape<kBlockScales>::kThreads, kBlockScales ? 1 : 2)
    gemm_kernel(const __grid_constant__ GemmKernelArgs p) {
  using S = Shape<kBlockScales>;
  constexpr int kN8 = S::kCols / 8;
  DIPTYCH_DYNAMIC_SHARED(shared);
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int warp_row = warp / (kTileOuter / S::kCols) * 64, warp_col = warp % (kTileOuter / S::kCols) * S::kCols;

  const int per_group = kGroup * p.tiles_n, group = blockIdx.x / per_group, in_group = blockIdx.x % per_group;
  const int rows = min(p.tiles_m - group * kGroup, kGroup);
  const int m0 = (group * kGroup + in_group % rows) * kTileOuter, n0 = in_group / rows * kTileOuter;
  // This thread's corner of D; its registers lie 16, 8 (rows) and 8, 1 (columns) apart.
  const int row = m0 + warp_row + lane / 4, col = n0 + warp_col + lane % 4 * 2;

  typename S::Sums acc = {};
  typename S::Sums part = {};  // kBlockScales: the sums of the running block
  float sa[8], sb[2 * kN8];    // kBlockScales: its scales for this thread's rows and columns

  // Step t multiplies stage t and fills stage t + 1 from memory, whose latency the products hide.
  for (int t = -1; t < p.tiles_k; ++t) {
    unsigned char* now = shared + (t & 1) * 2 * kTileBytes;
    unsigned char* next = shared + (~t & 1) * 2 * kTileBytes;
    const bool more = t + 1 < p.tiles_k;
    Fragment fa[S::kPerThread], fb[S::kPerThread];
    if (more) {
#pragma unroll
      for (int u = 0; u < S::kPerThread; ++u) {
        fa[u] = load_fragment<kA>(p.a, m0, (t + 1) * kTileK, tid + u * S::kThreads);
        fb[u] = load_fragment<kB>(p.b, n0, (t + 1) * kTileK, tid + u * S::kThreads);
      }
    }
    if (t >= 0) {
      if constexpr (kBlockScales) {
        if (t % p.period == 0) {
#pragma unroll
          for (int i = 0; i < 8; ++i) sa[i] = partial_scale(p.a, row + i * 8, t * kTileK);
#pragma unroll
          for (int j = 0; j < 2 * kN8; ++j) sb[j] = partial_scale(p.b, col + j / 2 * 8 + j % 2, t * kTileK);
        }
        multiply(part, now, now + kTileBytes, warp_row, warp_col);
        if ((t + 1) % p.period == 0 || !more) {
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
        multiply(acc, now, now + kTileBytes, warp_row, warp_col);
      }
    }
    if (more) {
#pragma unroll
      for (int u = 0; u < S::kPerThread; ++u) {
        store_fragment<kA>(p.a, fa[u], next, tid + u * S::kThreads);
        store_fragment<kB>(p.b, fb[u], next + kTileBytes, tid + u * S::kThreads);
      }
    }
    __syncthreads();
  }

  float factor = 1.0f;
  if constexpr (!kBlockScales) factor = __fmul_rn(partial_scale(p.a, 0, 0), partial_scale(p.b, 0, 0));
  float alpha[8];  // of this thread's rows
#pragma unroll
  for (int i = 0; i < 8; ++i) alpha[i] = row + i * 8 < p.e.m ? row_alpha(p.e, row + i * 8) : 0.0f;
#pragma unroll
  for (int j = 0; j < kN8; ++j) {
    const int c = col + j * 8;
    float bias[2] = {0.0f, 0.0f};
    if (p.e.bias) {
      if (c < p.e.n) bias[0] = load_as_float(p.e.bias, p.e.bias_type, c);
      if (c + 1 < p.e.n) bias[1] = load_as_float(p.e.bias, p.e.bias_type, c + 1);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* r = acc[i / 2][j] + i % 2 * 2;
      finish_pair(p.e, row + i * 8, c, alpha[i], __fmul_rn(r[0], factor), __fmul_rn(r[1], factor), bias[0], bias[1]);
    }
  }
}

Status make_operand(const QuantizedView& q, int64_t outer, int64_t k, Operand* o) {
  const FormatRow& f = row(q.format);
  const auto unsupported = [&](const char* what) {
    return Status(Code::unsupported, std::string("gemm: no CUDA kernel for ") + what + " of format " + f.name);
  };
  const bool e2m1 = f.element == DType::e2m1;
  if (f.element != DType::e4m3 && f.element != DType::e5m2 && !e2m1) return unsupported("the elements");
  // Only E2M1 times E4M3 is exact in bfloat16.
  const bool known = e2m1 ? f.scale == DType::e4m3 : f.scale == DType::f32 || f.scale == DType::e8m0;
  if (!known) return unsupported("the scales");
  *o = {};
  o->data = q.data.as<const uint8_t>(), o->scale = q.scale_inv.data, o->outer = static_cast<int>(outer),
  o->k = static_cast<int>(k);
  o->element = f.element;
  o->k_major = q.columnwise && f.columnwise == ColumnwiseLayout::row_major;
  o->kind = f.scale == DType::e8m0   ? ScaleKind::e8m0
            : f.scale == DType::e4m3 ? ScaleKind::e4m3
            : f.per_tensor()         ? ScaleKind::tensor
                                     : ScaleKind::block;
  const unsigned block_outer = f.per_tensor() ? 1 : f.block_rows, block_k = f.per_tensor() ? 1 : f.block_cols;
  // A fragment (16 k, or 8 outer x 4 k) and a tile of 64 k must not straddle the blocks whose scale they take.
  const bool fits = f.per_tensor() || (std::has_single_bit(block_outer) && std::has_single_bit(block_k) &&
                                       block_k % (o->kind == ScaleKind::block ? kTileK : 16) == 0);
  if (!fits || (f.per_tensor() && o->kind != ScaleKind::tensor)) return unsupported("the blocks");
  if (e2m1 && (o->k_major || k % 16 != 0)) return unsupported("the layout");
  o->outer_shift = std::countr_zero(block_outer), o->k_shift = std::countr_zero(block_k);
  o->scale_stride_outer = o->k_major ? 1 : ceil_div(k, block_k);
  o->scale_stride_k = o->k_major ? ceil_div(outer, block_outer) : 1;
  o->vec = o->k_major ? outer % 8 == 0 && aligned(o->data, 8) && aligned(o->scale, 8) && block_outer == 1
                      : k % 16 == 0 && aligned(o->data, 16 / f.pack());
  return {};
}

// More than 48 KiB of shared memory is granted per kernel and device; asking twice is harmless.
template <typename Kernel>
Status grant_shared(Kernel* kernel, int device, std::atomic<uint64_t>& granted) {
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (granted.load(std::memory_order_relaxed) & bit) return {};
  DIPTYCH_CUDA_TRY(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  granted.fetch_or(bit, std::memory_order_relaxed);
  return {};
}

template <bool kBlockScales, Layout kA, Layout kB>
Status run(const GemmKernelArgs& p, const Execution& exec) {
  static std::atomic<uint64_t> granted{0};
  DIPTYCH_TRY(grant_shared(gemm_kernel<kBlockScales, kA, kB>, exec.device.index, granted));
  return launch("gemm", gemm_kernel<kBlockScales, kA, kB>, static_cast<int64_t>(p.tiles_m) * p.tiles_n,
                Shape<kBlockScales>::kThreads, kSharedBytes, exec.stream, p);
}

}  // namespace

Status gemm_emulated(const GemmArgs& args, const Execution& exec) {
  GemmKernelArgs p{};
  const int64_t m = args.d.rows(), n = args.d.cols();
  if (m == 0 || n == 0) return {};
  const bool rows_last = args.a.columnwise && row(args.a.format).columnwise == ColumnwiseLayout::row_major;
  const int64_t k = rows_last ? args.a.data.rows() : args.a.data.cols() * row(args.a.format).pack();
  const int64_t tiles_m = ceil_div(m, kTileOuter), tiles_n = ceil_div(n, kTileOuter), limit = (int64_t{1} << 31) - 256;
  if (m > limit || n > limit || k > limit || tiles_m * tiles_n > limit) {
    return {Code::unsupported, "gemm: no CUDA kernel for D of [" + std::to_string(m) + ", " + std::to_string(n) +
                                   "] and K = " + std::to_string(k) + ": sizes end at 2^31 - 256"};
  }
  DIPTYCH_TRY(make_operand(args.a, m, k, &p.a));
  DIPTYCH_TRY(make_operand(args.b, n, k, &p.b));
  p.e = make_epilogue(args);
  p.k = static_cast<int>(k), p.tiles_k = static_cast<int>(ceil_div(k, kTileK));
  p.tiles_m = static_cast<int>(tiles_m), p.tiles_n = static_cast<int>(tiles_n);
  int k_shift = 62;
  for (const Operand* o : {&p.a, &p.b}) {
    if (o->kind == ScaleKind::block && o->k_shift < k_shift) k_shift = o->k_shift;
  }
  if (k_shift < 62) {
    p.period = static_cast<int>((int64_t{1} << k_shift) / kTileK);
    return run<true, Layout::either, Layout::either>(p, exec);
  }
  if (!p.a.vec || !p.b.vec) return run<false, Layout::either, Layout::either>(p, exec);
  if (p.a.k_major) {
    return p.b.k_major ? run<false, Layout::k_outer, Layout::k_outer>(p, exec)
                       : run<false, Layout::k_outer, Layout::outer_k>(p, exec);
  }
  return p.b.k_major ? run<false, Layout::outer_k, Layout::k_outer>(p, exec)
                     : run<false, Layout::outer_k, Layout::outer_k>(p, exec);
}

}  // namespace diptych::cuda
