// Any pair of formats, any shape, any alignment: FP8 decoded to bfloat16 in shared memory, mma.sync, float32 sums.
//
// E8M0 scales enter the operands, float32 block scales the block's partial sum, per-tensor scales the epilogue
// (NUMERICS 6). One thread block owns 128 x 128 of D and walks all of k: no split, no atomics.
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
  Operand a, b;       // outer is m for a, n for b
  Epilogue e;
  int64_t k;
  int tiles_m, tiles_n;
  int period;         // k tiles between two promotions of the partial sums; block scales only
};

// Warps lie 2 x 4 over the tile: 64 x 32 of D each, as 4 x 4 products of m16n8k16.
struct WarpTile {
  int row, col;  // of this warp's corner inside the tile
  __device__ WarpTile() : row(static_cast<int>(threadIdx.x) / 128 * 64), col(static_cast<int>(threadIdx.x) / 32 % 4 * 32) {}
};

using Sums = float[4][4][4];  // [m16][n8][registers of d]

__device__ __forceinline__ void multiply(Sums& sums, const unsigned char* a, const unsigned char* b, WarpTile w) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int kk = 0; kk < kTileK / 16; ++kk) {
    uint32_t fa[4][4], fb[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::ldmatrix_x4(fa[i], a + swizzled(w.row + i * 16 + lane % 16, kk * 2 + lane / 16));
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // two n8 at a time: registers 0, 1 and 2, 3
      ptx::ldmatrix_x4(fb[j], b + swizzled(w.col + j * 16 + lane % 8 + lane / 16 * 8, kk * 2 + lane / 8 % 2));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) ptx::mma_bf16(sums[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
    }
  }
}

template <bool kBlockScales>
__global__ void __launch_bounds__(kGemmThreads, kBlockScales ? 1 : 2) gemm_kernel(const __grid_constant__ GemmKernelArgs p) {
  DIPTYCH_DYNAMIC_SHARED(shared);
  const int lane = threadIdx.x % 32;
  const WarpTile warp;

  const int per_group = kGroup * p.tiles_n, group = blockIdx.x / per_group, in_group = blockIdx.x % per_group;
  const int rows = min(p.tiles_m - group * kGroup, kGroup);
  const int64_t m0 = static_cast<int64_t>(group * kGroup + in_group % rows) * kTileOuter;
  const int64_t n0 = static_cast<int64_t>(in_group / rows) * kTileOuter;
  // This thread's corner of D; its registers lie 16, 8 (rows) and 8, 1 (columns) apart.
  const int64_t row = m0 + warp.row + lane / 4, col = n0 + warp.col + lane % 4 * 2;

  Sums acc = {};
  Sums part = {};             // kBlockScales: the sums of the running block
  float sa[8], sb[8];         // kBlockScales: its scales for this thread's rows and columns
  const int tiles_k = static_cast<int>((p.k + kTileK - 1) / kTileK);

  Fragment fa, fb;
  if (tiles_k > 0) {
    fa = load_fragment(p.a, m0, 0), fb = load_fragment(p.b, n0, 0);
    store_fragment(p.a, fa, shared), store_fragment(p.b, fb, shared + kTileBytes);
  }
  __syncthreads();
  for (int t = 0; t < tiles_k; ++t) {
    unsigned char* now = shared + t % 2 * 2 * kTileBytes;
    unsigned char* next = shared + (t + 1) % 2 * 2 * kTileBytes;
    const int64_t k = static_cast<int64_t>(t) * kTileK;
    if (t + 1 < tiles_k) fa = load_fragment(p.a, m0, k + kTileK), fb = load_fragment(p.b, n0, k + kTileK);
    if constexpr (kBlockScales) {
      if (t % p.period == 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sa[i] = partial_scale(p.a, row + i * 8, k);
          sb[i] = partial_scale(p.b, col + i / 2 * 8 + i % 2, k);
        }
      }
      multiply(part, now, now + kTileBytes, warp);
      if ((t + 1) % p.period == 0 || t + 1 == tiles_k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
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
      multiply(acc, now, now + kTileBytes, warp);
    }
    if (t + 1 < tiles_k) store_fragment(p.a, fa, next), store_fragment(p.b, fb, next + kTileBytes);
    __syncthreads();
  }

  float factor = 1.0f;
  if constexpr (!kBlockScales) factor = __fmul_rn(partial_scale(p.a, 0, 0), partial_scale(p.b, 0, 0));
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int64_t c = col + j * 8;
    float bias[2] = {0.0f, 0.0f};
    if (p.e.bias) {
      if (c < p.e.n) bias[0] = load_as_float(p.e.bias, p.e.bias_type, c);
      if (c + 1 < p.e.n) bias[1] = load_as_float(p.e.bias, p.e.bias_type, c + 1);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* r = acc[i / 2][j] + i % 2 * 2;
      finish_pair(p.e, row + i * 8, c, __fmul_rn(r[0], factor), __fmul_rn(r[1], factor), bias[0], bias[1]);
    }
  }
}

Status make_operand(const QuantizedView& q, int64_t outer, int64_t k, Operand* o) {
  const FormatRow& f = row(q.format);
  const auto unsupported = [&](const char* what) {
    return Status(Code::unsupported, std::string("gemm: no CUDA kernel for ") + what + " of format " + f.name);
  };
  if (f.element != DType::e4m3 && f.element != DType::e5m2) return unsupported("the elements");
  if (f.scale != DType::f32 && f.scale != DType::e8m0) return unsupported("the scales");
  *o = {};
  o->data = q.data.as<const uint8_t>(), o->scale = q.scale_inv.data, o->outer = outer, o->k = k;
  o->e5m2 = f.element == DType::e5m2;
  o->k_major = q.columnwise && f.columnwise == ColumnwiseLayout::row_major;
  o->kind = f.scale == DType::e8m0 ? ScaleKind::e8m0 : f.per_tensor() ? ScaleKind::tensor : ScaleKind::block;
  const unsigned block_outer = f.per_tensor() ? 1 : f.block_rows, block_k = f.per_tensor() ? 1 : f.block_cols;
  // A fragment (16 k, or 8 outer x 4 k) and a tile of 64 k must not straddle the blocks whose scale they take.
  const bool fits = f.per_tensor() || (std::has_single_bit(block_outer) && std::has_single_bit(block_k) &&
                                       block_k % (o->kind == ScaleKind::block ? kTileK : 16) == 0);
  if (!fits || (f.per_tensor() && o->kind == ScaleKind::e8m0)) return unsupported("the blocks");
  o->outer_shift = std::countr_zero(block_outer), o->k_shift = std::countr_zero(block_k);
  o->scale_stride_outer = o->k_major ? 1 : ceil_div(k, block_k);
  o->scale_stride_k = o->k_major ? ceil_div(outer, block_outer) : 1;
  o->vec = o->k_major ? outer % 8 == 0 && aligned(o->data, 8) && aligned(o->scale, 8) && block_outer == 1
                      : k % 16 == 0 && aligned(o->data, 16);
  return {};
}

// More than 48 KiB of shared memory is granted per kernel and device; asking twice is harmless.
template <typename Kernel>
Status grant_shared(Kernel* kernel, int device, std::atomic<uint64_t>& granted) {
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (granted.load(std::memory_order_relaxed) & bit) return {};
  DIPTYCH_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  granted.fetch_or(bit, std::memory_order_relaxed);
  return {};
}

template <bool kBlockScales>
Status run(const GemmKernelArgs& p, const Execution& exec) {
  static std::atomic<uint64_t> granted{0};
  DIPTYCH_TRY(grant_shared(gemm_kernel<kBlockScales>, exec.device.index, granted));
  return launch("gemm", gemm_kernel<kBlockScales>, static_cast<int64_t>(p.tiles_m) * p.tiles_n, kGemmThreads,
                kSharedBytes, exec.stream, p);
}

}  // namespace

Status gemm_emulated(const GemmArgs& args, const Execution& exec) {
  GemmKernelArgs p{};
  const int64_t m = args.d.rows(), n = args.d.cols();
  if (m == 0 || n == 0) return {};
  const bool rows_last = args.a.columnwise && row(args.a.format).columnwise == ColumnwiseLayout::row_major;
  p.k = rows_last ? args.a.data.rows() : args.a.data.cols();
  p.e = make_epilogue(args);
  DIPTYCH_TRY(make_operand(args.a, m, p.k, &p.a));
  DIPTYCH_TRY(make_operand(args.b, n, p.k, &p.b));
  const int64_t tiles_m = ceil_div(m, kTileOuter), tiles_n = ceil_div(n, kTileOuter);
  if (tiles_m * tiles_n > 0x7fffffff / kGroup || p.k > (int64_t{1} << 36)) {
    return {Code::unsupported, "gemm: no CUDA kernel for [" + std::to_string(m) + ", " + std::to_string(p.k) +
                                   "] @ [" + std::to_string(p.k) + ", " + std::to_string(n) + "]: too large"};
  }
  p.tiles_m = static_cast<int>(tiles_m), p.tiles_n = static_cast<int>(tiles_n);
  int k_shift = 62;
  for (const Operand* o : {&p.a, &p.b}) {
    if (o->kind == ScaleKind::block && o->k_shift < k_shift) k_shift = o->k_shift;
  }
  if (k_shift == 62) return run<false>(p, exec);
  p.period = static_cast<int>((int64_t{1} << k_shift) / kTileK);
  return run<true>(p, exec);
}

}  // namespace diptych::cuda
