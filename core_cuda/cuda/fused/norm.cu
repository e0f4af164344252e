// layernorm and rmsnorm. A row belongs to a warp or, where it is long, to a thread block; which one follows from K
// alone, and so does the order of every sum.
#include "cuda/fused/column_sum.cuh"
#include "cuda/fused/source.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 256, kWarp = 32;
constexpr int64_t kLongRow = 2048;

struct RowsArgs {
  int64_t m, k;
  Elements x, gamma, beta, dy;
  Elements out;  // y or dx; null: statistics alone
  float *mu, *rsigma;
  float eps;
  bool centered;  // layernorm
  bool zero_centered_gamma;
  bool vec;  // every operand is aligned to 16 bytes, and k % 8 == 0
};

// The sum over the kLanes threads of a row, for all of them. `scratch`: a float for each warp.
template <int kLanes>
__device__ __forceinline__ float row_sum(float v, float* scratch) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) v += __shfl_xor_sync(kAllLanes, v, mask);
  if constexpr (kLanes > kWarp) {
    __syncthreads();  // the last sum has been read
    if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = v;
    __syncthreads();
    v = scratch[0];
#pragma unroll
    for (int w = 1; w < kLanes / kWarp; ++w) v += scratch[w];
  }
  return v;
}

__device__ __forceinline__ float sum8(const Floats8& f) {
  return ((f.v[0] + f.v[1]) + (f.v[2] + f.v[3])) + ((f.v[4] + f.v[5]) + (f.v[6] + f.v[7]));
}

// body(column, how many of eight exist) for this thread's groups of eight columns
template <int kLanes, typename Body>
__device__ __forceinline__ void each_group(int64_t k, Body&& body) {
  for (int64_t col = static_cast<int64_t>(threadIdx.x % kLanes) * 8; col < k; col += kLanes * 8) {
    body(col, k - col < 8 ? static_cast<int>(k - col) : 8);
  }
}

template <int kLanes>
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ RowsArgs p) {
  __shared__ float scratch[kThreads / kWarp];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  if (row >= p.m) return;  // all threads of a row
  const int64_t at = row * p.k;
  const float count = static_cast<float>(p.k > 0 ? p.k : 1);
  float mu = 0.0f;
  if (p.centered) {
    float s = 0.0f;
    each_group<kLanes>(p.k, [&](int64_t col, int n) { s += sum8(load8(p.x, at + col, n, p.vec)); });
    mu = divide_rn(row_sum<kLanes>(s, scratch), count);
  }
  float s = 0.0f;
  each_group<kLanes>(p.k, [&](int64_t col, int n) {
    Floats8 d = load8(p.x, at + col, n, p.vec);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float v = d.v[j] - mu;
      d.v[j] = j < n ? v * v : 0.0f;
    }
    s += sum8(d);
  });
  const float rsigma = divide_rn(1.0f, __fsqrt_rn(divide_rn(row_sum<kLanes>(s, scratch), count) + p.eps));
  if (threadIdx.x % kLanes == 0) {
    if (p.centered) p.mu[row] = mu;
    p.rsigma[row] = rsigma;
  }
  if (!p.out.data) return;
  each_group<kLanes>(p.k, [&](int64_t col, int n) {
    Floats8 y = load8(p.x, at + col, n, p.vec);
    const Floats8 g = load8(p.gamma, col, n, p.vec);
#pragma unroll
    for (int j = 0; j < 8; ++j) y.v[j] = normalized(y.v[j], mu, rsigma, g.v[j], p.zero_centered_gamma);
    if (p.beta.data) {
      const Floats8 b = load8(p.beta, col, n, p.vec);
#pragma unroll
      for (int j = 0; j < 8; ++j) y.v[j] += b.v[j];
    }
    store8(p.out, at + col, n, p.vec, y);
  });
}

// h = g * dy and xhat of eight columns; zeros where there are none
__device__ __forceinline__ void slopes(const RowsArgs& p, int64_t at, int64_t col, int n, float mu, float rsigma,
                                       Floats8& h, Floats8& xhat) {
  h = load8(p.dy, at + col, n, p.vec);
  xhat = load8(p.x, at + col, n, p.vec);
  const Floats8 g = load8(p.gamma, col, n, p.vec);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float scale = p.zero_centered_gamma ? 1.0f + g.v[j] : g.v[j];
    h.v[j] = j < n ? scale * h.v[j] : 0.0f;
    xhat.v[j] = j < n ? (xhat.v[j] - mu) * rsigma : 0.0f;
  }
}

template <int kLanes>
__global__ void __launch_bounds__(kThreads) norm_grad_kernel(const __grid_constant__ RowsArgs p) {
  __shared__ float scratch[kThreads / kWarp];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  if (row >= p.m) return;
  const int64_t at = row * p.k;
  const float count = static_cast<float>(p.k > 0 ? p.k : 1);
  const float mu = p.centered ? p.mu[row] : 0.0f, rsigma = p.rsigma[row];
  float of_h = 0.0f, of_product = 0.0f;
  each_group<kLanes>(p.k, [&](int64_t col, int n) {
    Floats8 h, xhat;
    slopes(p, at, col, n, mu, rsigma, h, xhat);
    of_h += sum8(h);
#pragma unroll
    for (int j = 0; j < 8; ++j) h.v[j] *= xhat.v[j];
    of_product += sum8(h);
  });
  const float mean = p.centered ? divide_rn(row_sum<kLanes>(of_h, scratch), count) : 0.0f;
  const float slope = divide_rn(row_sum<kLanes>(of_product, scratch), count);
  each_group<kLanes>(p.k, [&](int64_t col, int n) {
    Floats8 h, xhat;
    slopes(p, at, col, n, mu, rsigma, h, xhat);
#pragma unroll
    for (int j = 0; j < 8; ++j) h.v[j] = ((h.v[j] - mean) - xhat.v[j] * slope) * rsigma;
    store8(p.out, at + col, n, p.vec, h);
  });
}

// Sums of a chunk of rows: dy * xhat and, with kSums == 2, dy.
template <int kSums>
__global__ void __launch_bounds__(kSumThreads)
    parameter_kernel(const __grid_constant__ RowsArgs p, unsigned strips, float* part, int64_t stride) {
  sum_chunk<kSums>(p.m, p.k, strips, part, stride, [&](int64_t row, int64_t col, Floats8(&v)[kSums]) {
    const int n = row >= p.m || col >= p.k ? 0 : p.k - col < 8 ? static_cast<int>(p.k - col) : 8;
    const bool vec = p.vec && n == 8;
    const Floats8 d = load8(p.dy, row * p.k + col, n, vec), x = load8(p.x, row * p.k + col, n, vec);
    const float mu = p.centered && n > 0 ? p.mu[row] : 0.0f, rsigma = n > 0 ? p.rsigma[row] : 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) v[0].v[j] = j < n ? d.v[j] * ((x.v[j] - mu) * rsigma) : 0.0f;
    if constexpr (kSums == 2) v[1] = d;
  });
}

bool all_aligned(const RowsArgs& p) {
  bool vec = p.k % 8 == 0;
  for (const Elements* t : {&p.x, &p.gamma, &p.beta, &p.dy, &p.out}) vec = vec && aligned(t->data, 16);
  return vec;
}

Status launch_rows(const char* op, void (*per_warp)(RowsArgs), void (*per_block)(RowsArgs), const RowsArgs& p,
                   const Execution& exec) {
  if (p.m == 0) return {};
  return p.k > kLongRow ? launch(op, per_block, p.m, kThreads, 0, exec.stream, p)
                        : launch(op, per_warp, ceil_div(p.m, kThreads / kWarp), kThreads, 0, exec.stream, p);
}

}  // namespace

// Two sums for each chunk and column.
int64_t norm_grad_workspace_bytes(int64_t m, int64_t k) { return 2 * column_sum_workspace_bytes(m, k); }

Status norm(const NormArgs& args, const Execution& exec) {
  RowsArgs p{};
  p.m = args.x.rows(), p.k = args.x.cols(), p.eps = args.eps, p.centered = args.norm == Norm::layernorm;
  p.zero_centered_gamma = args.zero_centered_gamma;
  p.x = Elements(args.x), p.gamma = Elements(args.gamma), p.beta = Elements(args.beta), p.out = Elements(args.y);
  p.mu = args.mu.as<float>(), p.rsigma = args.rsigma.as<float>(), p.vec = all_aligned(p);
  return launch_rows("norm", norm_kernel<kWarp>, norm_kernel<kThreads>, p, exec);
}

Status norm_grad(const NormGradArgs& args, const Execution& exec) {
  RowsArgs p{};
  p.m = args.x.rows(), p.k = args.x.cols(), p.centered = args.norm == Norm::layernorm;
  p.zero_centered_gamma = args.zero_centered_gamma;
  p.x = Elements(args.x), p.gamma = Elements(args.gamma), p.dy = Elements(args.dy), p.out = Elements(args.dx);
  p.mu = args.mu.as<float>(), p.rsigma = args.rsigma.as<float>(), p.vec = all_aligned(p);
  DIPTYCH_TRY(launch_rows("norm_grad", norm_grad_kernel<kWarp>, norm_grad_kernel<kThreads>, p, exec));

  const int64_t chunks = ceil_div(p.m, kSumChunk), strips = sum_strips(p.k), stride = chunks * p.k;
  float* part = args.workspace.as<float>();
  if (stride > 0) {
    DIPTYCH_TRY(launch("norm_grad", args.dbeta.given() ? parameter_kernel<2> : parameter_kernel<1>, chunks * strips,
                       kSumThreads, 0, exec.stream, p, static_cast<unsigned>(strips), part, stride));
  }
  DIPTYCH_TRY(join_chunks("norm_grad", part, chunks, p.k, args.dgamma, exec));
  return args.dbeta.given() ? join_chunks("norm_grad", part + stride, chunks, p.k, args.dbeta, exec) : Status();
}

}  // namespace diptych::cuda
