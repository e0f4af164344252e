// out[n] = sum over rows of dy[., n] in float32. The order follows from the shape alone: chunks of 256 rows, in a
// chunk eight interleaved runs, both joined in ascending order; then the chunks' sums the same way. No atomics.
#include "cuda/launch.cuh"
#include "cuda/vector.cuh"

namespace diptych::cuda {
namespace {

constexpr int kChunk = 256, kRuns = 8, kThreads = 32 * kRuns, kUnroll = 4;

// partial[chunk][n]: a thread sums every eighth row of one chunk for the columns of one 16-byte vector.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    chunk_kernel(const T* __restrict__ dy, int64_t m, int64_t n, unsigned column_blocks, bool vec,
                 float* __restrict__ partial) {
  constexpr int kN = Vec<T>::kCount;
  __shared__ float sums[kRuns][32 * kN];
  const int lane = threadIdx.x % 32, run = threadIdx.x / 32;
  const int64_t chunk = blockIdx.x / column_blocks;
  const int64_t col0 = static_cast<int64_t>(blockIdx.x % column_blocks) * 32 * kN, col = col0 + lane * kN;
  const int64_t end = chunk * kChunk + kChunk < m ? chunk * kChunk + kChunk : m;

  float acc[kN] = {};
  for (int64_t row = chunk * kChunk + run; row < end; row += kRuns * kUnroll) {
    Vec<T> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t r = row + u * kRuns;
      if (r >= end || col >= n) continue;
      const T* p = dy + r * n + col;
      if (vec) {
        v[u] = Vec<T>::load(p);
      } else {
#pragma unroll
        for (int i = 0; i < kN; ++i) {
          if (col + i >= n) continue;
          if constexpr (sizeof(T) == 4) {
            v[u].w[i] = __builtin_bit_cast(uint32_t, p[i]);
          } else {
            v[u].w[i / 2] |= static_cast<uint32_t>(__builtin_bit_cast(unsigned short, p[i])) << (i % 2 * 16);
          }
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int i = 0; i < kN; ++i) acc[i] = __fadd_rn(acc[i], v[u][i]);  // past the end: + 0
    }
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) sums[run][lane * kN + i] = acc[i];
  __syncthreads();
  for (int c = threadIdx.x; c < 32 * kN && col0 + c < n; c += kThreads) {
    float s = sums[0][c];
#pragma unroll
    for (int r = 1; r < kRuns; ++r) s = __fadd_rn(s, sums[r][c]);
    partial[chunk * n + col0 + c] = s;
  }
}

// out[n] = sum of partial[.][n]; 32 columns a block, eight interleaved runs of chunks.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    join_kernel(const float* __restrict__ partial, int64_t chunks, int64_t n, T* __restrict__ out) {
  __shared__ float sums[kRuns][32];
  const int lane = threadIdx.x % 32, run = threadIdx.x / 32;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  float s = 0.0f;
  if (col < n) {
#pragma unroll 4
    for (int64_t c = run; c < chunks; c += kRuns) s = __fadd_rn(s, partial[c * n + col]);
  }
  sums[run][lane] = s;
  __syncthreads();
  if (run != 0 || col >= n) return;
#pragma unroll
  for (int r = 1; r < kRuns; ++r) s = __fadd_rn(s, sums[r][lane]);
  out[col] = from_float<T>(s);
}

}  // namespace

// ((m + 255) // 256) * n * 4
int64_t bias_grad_workspace_bytes(int64_t m, int64_t n) { return ceil_div(m, kChunk) * n * 4; }

Status bias_grad(const BiasGradArgs& args, const Execution& exec) {
  const int64_t m = args.dy.rows(), n = args.dy.cols();
  if (n == 0) return {};
  const int64_t chunks = ceil_div(m, kChunk);
  float* partial = args.workspace.as<float>();
  if (chunks > 0) {
    DIPTYCH_TRY(with_float_type(args.dy.dtype, "bias_grad", [&](auto type) {
      using T = decltype(type);
      const T* dy = args.dy.as<const T>();
      const int64_t column_blocks = ceil_div(n, 32 * Vec<T>::kCount);
      const bool vec = aligned(dy, 16) && n % Vec<T>::kCount == 0;
      return launch("bias_grad", chunk_kernel<T>, chunks * column_blocks, kThreads, 0, exec.stream, dy, m, n,
                    static_cast<unsigned>(column_blocks), vec, partial);
    }));
  }
  return with_float_type(args.out.dtype, "bias_grad", [&](auto type) {
    using T = decltype(type);
    return launch("bias_grad", join_kernel<T>, ceil_div(n, 32), kThreads, 0, exec.stream,
                  static_cast<const float*>(partial), chunks, n, args.out.as<T>());
  });
}

}  // namespace diptych::cuda
