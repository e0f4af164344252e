#include "cuda/source/column_sum.cuh"
#include "cuda/source/source.cuh"

namespace diptych::cuda {
namespace {

template <typename In>
__global__ void __launch_bounds__(kSumThreads)
    chunk_kernel(const __grid_constant__ SourceArgs p, unsigned strips, float* part) {
  const ChunkPlace place(strips);
  const Reader<In> source(p, place.row(), place.col(), kSumWarps);
  sum_chunk<1>(
      place, p.m, p.k, part, 0, [&](int i) { return source.load(i); },
      [&](int i, const auto& raw, Floats8(&v)[1]) { v[0] = source.values(i, raw); });
}

__global__ void __launch_bounds__(kSumThreads)
    join_kernel(const float* __restrict__ part, int64_t chunks, int64_t k, Elements out, Elements second) {
  int64_t c = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (c >= k) {
    c -= k, part += chunks * k, out = second;
    if (c >= k || !out.data) return;
  }
  float s = 0.0f;
#pragma unroll 8
  for (int64_t i = 0; i < chunks; ++i) s += part[i * k + c];
  store_element(out, c, s);
}

}  // namespace

int64_t column_sum_workspace_bytes(int64_t m, int64_t k) { return ceil_div(m, kSumChunk) * k * 4; }

Status join_chunks(const char* op, const float* part, int64_t chunks, int64_t k, const TensorView& out,
                   const TensorView& second, const Execution& exec) {
  if (k == 0) return {};
  const int64_t columns = second.given() ? 2 * k : k;
  return launch(op, join_kernel, ceil_div(columns, kSumThreads), kSumThreads, 0, exec.stream, part, chunks, k,
                Elements(out), Elements(second));
}

Status column_sums(const TensorView& x, const Source& source, const TensorView& out, const TensorView& workspace,
                   const Execution& exec) {
  const SourceArgs p = source_args(x, source);
  const int64_t chunks = ceil_div(p.m, kSumChunk), strips = sum_strips(p.k);
  float* part = workspace.as<float>();
  if (chunks * strips > 0) {
    DIPTYCH_TRY(with_input_type(p, "column_sum", [&](auto type) {
      return launch("column_sum", chunk_kernel<decltype(type)>, chunks * strips, kSumThreads, 0, exec.stream, p,
                    static_cast<unsigned>(strips), part);
    }));
  }
  return join_chunks("column_sum", part, chunks, p.k, out, {}, exec);
}

}  // namespace diptych::cuda
