// layernorm and rmsnorm. A warp computes a row or, if the row is long, a thread block does. K alone decides which, and
// the order of every sum. Rows of the usual types are read once and kept in registers if they fit.
#include "cuda/base/launch.cuh"
#include "cuda/kernels.h"
#include "cuda/source/column_sum.cuh"
#include "cuda/source/source.cuh"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 256, kWarp = 32;
constexpr int64_t kLongRow = 2048;

struct RowsArgs {
  int64_t m, k;
  Elements x, gamma, beta, dy;
  Elements out;  // y or dx; null: only the statistics are wanted
  float *mu, *rsigma;
  float eps;
  bool centered;  // layernorm
  bool zero_centered_gamma;
  bool vec;  // every operand is aligned to 16 bytes, and k % 8 == 0
};

// Returns the sum of v over the kLanes threads of a row to all of them. `scratch`: a float for each warp.
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

// Calls body(group, column, how many of the eight columns exist) for this thread's groups of eight columns. There are
// at most kGroups, or any number if kGroups is 0.
template <int kLanes, int kGroups, typename Body>
__device__ __forceinline__ void each_group(int64_t k, Body&& body) {
  const int64_t first = static_cast<int64_t>(threadIdx.x % kLanes) * 8;
  if constexpr (kGroups == 0) {
    for (int64_t col = first; col < k; col += kLanes * 8) body(0, col, k - col < 8 ? static_cast<int>(k - col) : 8);
  } else {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (first + g * kLanes * 8 < k) body(g, first + g * kLanes * 8, 8);
    }
  }
}

// This thread's part of a row of a tensor, kept in registers or read each time.
template <int kLanes, int kGroups, typename T>
class RowPart {
 public:
  __device__ __forceinline__ RowPart(const Elements& t, int64_t at, int64_t k, bool vec) : t_(t), at_(at), vec_(vec) {
    if constexpr (kGroups > 0) {
      each_group<kLanes, kGroups>(k, [&](int g, int64_t col, int n) { kept_[g] = load_raw8<T>(t, at + col, n, true); });
    }
  }
  __device__ __forceinline__ Floats8 get(int g, int64_t col, int n) const {
    if constexpr (kGroups > 0) return as_floats(kept_[g]);
    return as_floats(load_raw8<T>(t_, at_ + col, n, vec_));
  }

 private:
  const Elements& t_;
  int64_t at_;
  bool vec_;
  Raw8<T> kept_[kGroups > 0 ? kGroups : 1];
};

template <int kLanes, int kGroups, typename T>
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ RowsArgs p) {
  __shared__ float scratch[kThreads / kWarp];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  if (row >= p.m) return;  // as do all threads of this row
  const int64_t at = row * p.k;
  const float count = static_cast<float>(p.k > 0 ? p.k : 1);
  const RowPart<kLanes, kGroups, T> x(p.x, at, p.k, p.vec);
  float mu = 0.0f;
  if (p.centered) {
    float s = 0.0f;
    each_group<kLanes, kGroups>(p.k, [&](int g, int64_t col, int n) { s += sum8(x.get(g, col, n)); });
    mu = divide_rn(row_sum<kLanes>(s, scratch), count);
  }
  float s = 0.0f;
  each_group<kLanes, kGroups>(p.k, [&](int g, int64_t col, int n) {
    Floats8 d = x.get(g, col, n);
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
  each_group<kLanes, kGroups>(p.k, [&](int i, int64_t col, int n) {
    Floats8 y = x.get(i, col, n);
    const Floats8 g = load8(p.gamma, col, n, p.vec);
#pragma unroll
    for (int j = 0; j < 8; ++j) y.v[j] = normalized(y.v[j], mu, rsigma, gain(g.v[j], p.zero_centered_gamma));
    if (p.beta.data) {
      const Floats8 b = load8(p.beta, col, n, p.vec);
#pragma unroll
      for (int j = 0; j < 8; ++j) y.v[j] += b.v[j];
    }
    store8(p.out, at + col, n, p.vec, y);
  });
}

template <int kLanes, int kGroups, typename T>
__global__ void __launch_bounds__(kThreads) norm_grad_kernel(const __grid_constant__ RowsArgs p) {
  __shared__ float scratch[kThreads / kWarp];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  if (row >= p.m) return;
  const int64_t at = row * p.k;
  const float count = static_cast<float>(p.k > 0 ? p.k : 1);
  const float mu = p.centered ? p.mu[row] : 0.0f, rsigma = p.rsigma[row];
  const RowPart<kLanes, kGroups, T> x(p.x, at, p.k, p.vec), dy(p.dy, at, p.k, p.vec);
  // h = g * dy and xhat of eight columns; zeros for columns that do not exist
  const auto slopes = [&](int i, int64_t col, int n, Floats8& h, Floats8& xhat) {
    h = dy.get(i, col, n), xhat = x.get(i, col, n);
    const Floats8 g = load8(p.gamma, col, n, p.vec);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      h.v[j] = j < n ? gain(g.v[j], p.zero_centered_gamma) * h.v[j] : 0.0f;
      xhat.v[j] = j < n ? (xhat.v[j] - mu) * rsigma : 0.0f;
    }
  };
  float of_h = 0.0f, of_product = 0.0f;
  each_group<kLanes, kGroups>(p.k, [&](int i, int64_t col, int n) {
    Floats8 h, xhat;
    slopes(i, col, n, h, xhat);
    of_h += sum8(h);
#pragma unroll
    for (int j = 0; j < 8; ++j) h.v[j] *= xhat.v[j];
    of_product += sum8(h);
  });
  const float mean = p.centered ? divide_rn(row_sum<kLanes>(of_h, scratch), count) : 0.0f;
  const float slope = divide_rn(row_sum<kLanes>(of_product, scratch), count);
  each_group<kLanes, kGroups>(p.k, [&](int i, int64_t col, int n) {
    Floats8 h, xhat;
    slopes(i, col, n, h, xhat);
#pragma unroll
    for (int j = 0; j < 8; ++j) h.v[j] = ((h.v[j] - mean) - xhat.v[j] * slope) * rsigma;
    store8(p.out, at + col, n, p.vec, h);
  });
}

// Sums dy * xhat over a chunk of rows and, with kSums == 2, dy.
template <int kSums, typename T>
__global__ void __launch_bounds__(kSumThreads)
    parameter_kernel(const __grid_constant__ RowsArgs p, unsigned strips, float* part, int64_t stride) {
  struct Raw {
    Raw8<T> d, x;
    float mu, rsigma;
  };
  const ChunkPlace place(strips);
  const int64_t row0 = place.row(), col = place.col(), left = p.k - col;
  const int count = left < 0 ? 0 : left < 8 ? static_cast<int>(left) : 8;
  const auto there = [&](int i) { return row0 + i * kSumWarps < p.m ? count : 0; };
  sum_chunk<kSums>(
      place, p.m, p.k, part, stride,
      [&](int i) {
        const int64_t row = row0 + i * kSumWarps, at = row * p.k + col;
        const int n = there(i);
        const bool vec = p.vec && n == 8;
        return Raw{load_raw8<T>(p.dy, at, n, vec), load_raw8<T>(p.x, at, n, vec),
                   p.centered && n > 0 ? p.mu[row] : 0.0f, n > 0 ? p.rsigma[row] : 0.0f};
      },
      [&](int i, const Raw& r, Floats8(&v)[kSums]) {
        const int n = there(i);
        const Floats8 d = as_floats(r.d), x = as_floats(r.x);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[0].v[j] = j < n ? d.v[j] * ((x.v[j] - r.mu) * r.rsigma) : 0.0f;
        if constexpr (kSums == 2) v[1] = d;
      });
}

bool all_aligned(const RowsArgs& p) {
  bool vec = p.k % 8 == 0;
  for (const Elements* t : {&p.x, &p.gamma, &p.beta, &p.dy, &p.out}) vec = vec && aligned(t->data, 16);
  return vec;
}

// Calls f with the type of x and dy if that is one of the usual types and rows are aligned; else with void: the type is
// then found at run time in each load.
template <typename F>
Status with_rows(const RowsArgs& p, F&& f) {
  const bool one = p.vec && (!p.dy.data || p.dy.type == p.x.type);
  if (one && p.x.type == DType::bf16) return f(std::type_identity<__nv_bfloat16>());
  if (one && p.x.type == DType::f32) return f(std::type_identity<float>());
  return f(std::type_identity<void>());
}

// Calls f(type, lanes of a row, groups that a thread keeps in registers); the type is void if it keeps none.
template <int kLanes, typename T, typename F>
Status with_groups(std::type_identity<T> type, int64_t k, F&& f) {
  constexpr std::integral_constant<int, kLanes> lanes;
  if constexpr (!std::is_void_v<T>) {
    const int64_t groups = ceil_div(k, kLanes * 8);
    if (groups <= 2) return f(type, lanes, std::integral_constant<int, 2>());
    if constexpr (sizeof(T) == 2) {
      if (groups <= 4) return f(type, lanes, std::integral_constant<int, 4>());
      if (groups <= 8) return f(type, lanes, std::integral_constant<int, 8>());
    }
  }
  return f(std::type_identity<void>(), lanes, std::integral_constant<int, 0>());
}

// Calls f(type, lanes, groups, thread blocks).
template <typename F>
Status launch_rows(const RowsArgs& p, F&& f) {
  if (p.m == 0) return {};
  const auto run = [&](auto type, auto lanes, auto groups) {
    constexpr int kRows = kThreads / lanes;
    return f(type, lanes, groups, ceil_div(p.m, kRows));
  };
  return with_rows(p, [&](auto type) {
    return p.k > kLongRow ? with_groups<kThreads>(type, p.k, run) : with_groups<kWarp>(type, p.k, run);
  });
}

}  // namespace

// Two float32 sums for each chunk and column.
int64_t norm_grad_workspace_bytes(int64_t m, int64_t k) { return 2 * column_sum_workspace_bytes(m, k); }

Status norm(const NormArgs& args, const Execution& exec) {
  RowsArgs p{};
  p.m = args.x.rows(), p.k = args.x.cols(), p.eps = args.eps, p.centered = args.norm == Norm::layernorm;
  p.zero_centered_gamma = args.zero_centered_gamma;
  p.x = Elements(args.x), p.gamma = Elements(args.gamma), p.beta = Elements(args.beta), p.out = Elements(args.y);
  p.mu = args.mu.as<float>(), p.rsigma = args.rsigma.as<float>(), p.vec = all_aligned(p);
  return launch_rows(p, [&](auto type, auto lanes, auto groups, int64_t blocks) {
    using T = typename decltype(type)::type;
    return launch("norm", norm_kernel<lanes, groups, T>, blocks, kThreads, 0, exec.stream, p);
  });
}

Status norm_grad(const NormGradArgs& args, const Execution& exec) {
  if (args.x.cols() == 0) return {};  // rows may be any number then
  RowsArgs p{};
  p.m = args.x.rows(), p.k = args.x.cols(), p.centered = args.norm == Norm::layernorm;
  p.zero_centered_gamma = args.zero_centered_gamma;
  p.x = Elements(args.x), p.gamma = Elements(args.gamma), p.dy = Elements(args.dy), p.out = Elements(args.dx);
  p.mu = args.mu.as<float>(), p.rsigma = args.rsigma.as<float>(), p.vec = all_aligned(p);
  DIPTYCH_TRY(launch_rows(p, [&](auto type, auto lanes, auto groups, int64_t blocks) {
    using T = typename decltype(type)::type;
    return launch("norm_grad", norm_grad_kernel<lanes, groups, T>, blocks, kThreads, 0, exec.stream, p);
  }));

  const int64_t chunks = ceil_div(p.m, kSumChunk), strips = sum_strips(p.k), stride = chunks * p.k;
  float* part = args.workspace.as<float>();
  if (stride > 0) {
    DIPTYCH_TRY(with_rows(p, [&](auto type) {
      using T = typename decltype(type)::type;
      return launch("norm_grad", args.dbeta.given() ? parameter_kernel<2, T> : parameter_kernel<1, T>, chunks * strips,
                    kSumThreads, 0, exec.stream, p, static_cast<unsigned>(strips), part, stride);
    }));
  }
  DIPTYCH_TRY(join_chunks("norm_grad", part, chunks, p.k, args.dgamma, exec));
  return args.dbeta.given() ? join_chunks("norm_grad", part + stride, chunks, p.k, args.dbeta, exec) : Status();
}

}  // namespace diptych::cuda
