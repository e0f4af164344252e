#include <algorithm>

#include "cuda/base/launch.cuh"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/finish.h"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 256, kSquare = 32;

struct LayoutArgs {
  ScaleLayoutJob job[2];
  unsigned squares[2], squares_k[2];  // number of 32 x 32 tiles: all, and along k
};

__global__ void __launch_bounds__(kThreads) layout_kernel(const __grid_constant__ LayoutArgs p) {
  __shared__ float square[kSquare][kSquare + 1];
  const int which = blockIdx.x < p.squares[0] ? 0 : 1;
  const ScaleLayoutJob& j = p.job[which];
  const unsigned index = blockIdx.x - (which ? p.squares[0] : 0);
  const int64_t o0 = static_cast<int64_t>(index / p.squares_k[which]) * kSquare;
  const int64_t k0 = static_cast<int64_t>(index % p.squares_k[which]) * kSquare;
  const int x = threadIdx.x % kSquare, y = threadIdx.x / kSquare;
  for (int r = y; r < kSquare; r += kThreads / kSquare) {
    const int64_t o = o0 + r, k = k0 + x;
    square[r][x] = o < j.blocks && k < j.k_blocks ? j.from[o * j.k_blocks + k] : 0.0f;
  }
  __syncthreads();
  for (int r = y; r < kSquare; r += kThreads / kSquare) {
    if (j.transposed) {
      const int64_t o = o0 + x, k = k0 + r;
      if (o < j.blocks && k < j.k_blocks) j.to[k * j.blocks + o] = square[x][r];
    } else {
      const int64_t o = o0 + r, k = k0 + x;
      if (o < j.blocks && k < j.k_stride) j.to[o * j.k_stride + k] = square[r][x];
    }
  }
}

// A thread finishes four columns of a row.
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const __grid_constant__ Epilogue e, const float* acc, int64_t quads) {
  const int64_t q = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (q >= quads) return;
  const int64_t row = q * 4 / e.n, col = q * 4 % e.n;  // n % 4 == 0
  const float4 v = *reinterpret_cast<const float4*>(acc + q * 4);
  float bias[4] = {};
  if (e.bias) {
#pragma unroll
    for (int i = 0; i < 4; ++i) bias[i] = load_as_float(e.bias, e.bias_type, col + i);
  }
  finish_pair(e, row, col, e.alpha, v.x, v.y, bias[0], bias[1]);
  finish_pair(e, row, col + 2, e.alpha, v.z, v.w, bias[2], bias[3]);
}

}  // namespace

Status lay_out_scales(const ScaleLayoutJob (&jobs)[2], const Execution& exec) {
  LayoutArgs p{};
  for (int i = 0; i < 2; ++i) {
    p.job[i] = jobs[i];
    p.squares_k[i] = static_cast<unsigned>(ceil_div(std::max(jobs[i].k_stride, jobs[i].k_blocks), kSquare));
    p.squares[i] = static_cast<unsigned>(ceil_div(jobs[i].blocks, kSquare)) * p.squares_k[i];
  }
  return launch("gemm: scale layout", layout_kernel, static_cast<int64_t>(p.squares[0]) + p.squares[1], kThreads, 0,
                exec.stream, p);
}

Status finish_gemm(const float* acc, const GemmArgs& args, const Execution& exec) {
  Epilogue e = make_epilogue(args);
  e.alpha = 1.0f;  // cuBLASLt has applied alpha; a factor of 1 is exact
  const int64_t quads = e.m * e.n / 4;
  return launch("gemm: epilogue", finish_kernel, ceil_div(quads, kThreads), kThreads, 0, exec.stream, e, acc, quads);
}

}  // namespace diptych::cuda
