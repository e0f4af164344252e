// out[n] = sum over rows of dy[., n] in float32, chunk by chunk.
#include "cuda/gemm/column_chunks.cuh"

namespace diptych::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    chunk_kernel(const T* __restrict__ dy, int64_t m, int64_t n, unsigned column_blocks, bool vec,
                 float* __restrict__ partial) {
  const int64_t chunk = blockIdx.x / column_blocks, row = chunk * kChunk;
  const int64_t col0 = static_cast<int64_t>(blockIdx.x % column_blocks) * 32 * Vec<T>::kCount;
  sum_chunk(dy, row, row + kChunk < m ? row + kChunk : m, n, col0, vec, partial + chunk * n);
}

template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    join_kernel(const float* __restrict__ partial, int64_t chunks, int64_t n, T* __restrict__ out) {
  join_chunks(partial, chunks, n, static_cast<int64_t>(blockIdx.x) * 32, out);
}

}  // namespace

// A row of n float32 sums for each chunk of 256 rows.
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
      return launch("bias_grad", chunk_kernel<T>, chunks * column_blocks, kSumThreads, 0, exec.stream, dy, m, n,
                    static_cast<unsigned>(column_blocks), vec, partial);
    }));
  }
  return with_float_type(args.out.dtype, "bias_grad", [&](auto type) {
    using T = decltype(type);
    return launch("bias_grad", join_kernel<T>, ceil_div(n, 32), kSumThreads, 0, exec.stream,
                  static_cast<const float*>(partial), chunks, n, args.out.as<T>());
  });
}

}  // namespace diptych::cuda
