// layernorm and rmsnorm. A warp computes a row or, if the row is long, a thread block does. K alone decides which, and
// the order of every sum. Rows of the usual types are read once and kept in registers if they fit.
#include "cuda/base/launch.cuh"
#include "cuda/source/column_sum.cuh"
#include "cuda/source/source.cuh"
#include "diptych/norm.h"

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

// Replaces each v by its sum over the kLanes threads of a row. `scratch`: kN floats for each warp.
template <int kLanes, int kN>
__device__ __forceinline__ void row_sums(float (&v)[kN], float* scratch) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
    for (int i = 0; i < kN; ++i) v[i] += __shfl_xor_sync(kAllLanes, v[i], mask);
  }
  if constexpr (kLanes > kWarp) {
    constexpr int kWarps = kLanes / kWarp;
    __syncthreads();  // the last sums have been read
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      if (threadIdx.x % kWarp == 0) scratch[i * kWarps + threadIdx.x / kWarp] = v[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      v[i] = scratch[i * kWarps];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) v[i] += scratch[i * kWarps + w];
    }
  }
}

template <int kLanes>
__device__ __forceinline__ float row_sum(float v, float* scratch) {
  float one[1] = {v};
  row_sums<kLanes>(one, scratch);
  return one[0];
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

// Of eight columns of a row.
struct Slopes {
  Floats8 h, xhat;  // h = gain * dy

  __device__ __forceinline__ float product() const {
    Floats8 f;
#pragma unroll
    for (int j = 0; j < 8; ++j) f.v[j] = h.v[j] * xhat.v[j];
    return sum8(f);
  }
  __device__ __forceinline__ Floats8 gradient(float mean, float slope, float rsigma) const {
    Floats8 f;
#pragma unroll
    for (int j = 0; j < 8; ++j) f.v[j] = ((h.v[j] - mean) - xhat.v[j] * slope) * rsigma;
    return f;
  }
};

__device__ __forceinline__ Floats8 gains(const RowsArgs& p, int64_t col, int n) {
  Floats8 g = load8(p.gamma, col, n, p.vec);
#pragma unroll
  for (int j = 0; j < 8; ++j) g.v[j] = gain(g.v[j], p.zero_centered_gamma);
  return g;
}

// Only n columns exist; those that do not are zeros.
__device__ __forceinline__ Slopes slopes(const Floats8& x, const Floats8& dy, const Floats8& gains, float mu,
                                         float rsigma, int n) {
  Slopes s;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    s.h.v[j] = j < n ? gains.v[j] * dy.v[j] : 0.0f;
    s.xhat.v[j] = j < n ? (x.v[j] - mu) * rsigma : 0.0f;
  }
  return s;
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
  const auto at_group = [&](int i, int64_t col, int n) {
    return slopes(x.get(i, col, n), dy.get(i, col, n), gains(p, col, n), mu, rsigma, n);
  };
  float of_h = 0.0f, of_product = 0.0f;
  each_group<kLanes, kGroups>(p.k, [&](int i, int64_t col, int n) {
    const Slopes s = at_group(i, col, n);
    of_h += sum8(s.h), of_product += s.product();
  });
  const float mean = p.centered ? divide_rn(row_sum<kLanes>(of_h, scratch), count) : 0.0f;
  const float slope = divide_rn(row_sum<kLanes>(of_product, scratch), count);
  each_group<kLanes, kGroups>(p.k, [&](int i, int64_t col, int n) {
    store8(p.out, at + col, n, p.vec, at_group(i, col, n).gradient(mean, slope, rsigma));
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

// dx, and the sums of parameter_kernel, from one read of long rows: a thread block takes a chunk of rows, kBatch of
// them between two barriers while the next ones are loaded. kCentered: layernorm, with both sums.
template <bool kCentered, int kGroups, typename T>
__global__ void __launch_bounds__(kThreads, 1)
    chunk_grad_kernel(const __grid_constant__ RowsArgs p, float* part, int64_t stride) {
  constexpr int kBatch = 16 / (kGroups * int{sizeof(T)}), kSums = kCentered ? 2 : 1;
  struct Row {
    Raw8<T> x[kGroups], dy[kGroups];
    float mu = 0.0f, rsigma = 0.0f;
  };
  __shared__ __align__(16) float scratch[kSums * kBatch * (kThreads / kWarp)];
  const auto each = [&](auto&& body) { each_group<kThreads, kGroups>(p.k, body); };
  const int64_t row0 = blockIdx.x * kSumChunk;
  const int rows = static_cast<int>(min(p.m - row0, kSumChunk));
  const float count = static_cast<float>(p.k);
  Floats8 g[kGroups], of_product[kGroups] = {}, of_dy[kGroups] = {};
  each([&](int i, int64_t col, int) { g[i] = gains(p, col, 8); });
  Row now[kBatch], next[kBatch];
  const auto load = [&](int first) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b >= rows) return;
      const int64_t row = row0 + first + b;
      if (kCentered) next[b].mu = p.mu[row];
      next[b].rsigma = p.rsigma[row];
      each([&](int i, int64_t col, int) {
        next[b].x[i] = load_vectors<T>(p.x.data, row * p.k + col);
        next[b].dy[i] = load_vectors<T>(p.dy.data, row * p.k + col);
      });
    }
  };
  const auto slopes_of = [&](const Row& r, int i) {
    return slopes(as_floats(r.x[i]), as_floats(r.dy[i]), g[i], r.mu, r.rsigma, 8);
  };
  load(0);
#pragma unroll 2
  for (int first = 0; first < rows; first += kBatch) {
    float sums[kSums * kBatch] = {};  // of the products, then of h
#pragma unroll
    for (int b = 0; b < kBatch; ++b) now[b] = next[b];
    load(first + kBatch);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      each([&](int i, int64_t, int) {
        const Slopes s = slopes_of(now[b], i);
        sums[b] += s.product();
        if constexpr (kCentered) sums[kBatch + b] += sum8(s.h);
      });
    }
    row_sums<kThreads>(sums, scratch);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b >= rows) break;
      const float slope = divide_rn(sums[b], count);
      float mean = 0.0f;
      if constexpr (kCentered) mean = divide_rn(sums[kBatch + b], count);
      each([&](int i, int64_t col, int) {
        const Slopes s = slopes_of(now[b], i);
        store8(p.out, (row0 + first + b) * p.k + col, 8, true, s.gradient(mean, slope, now[b].rsigma));
        const Floats8 dy = as_floats(now[b].dy[i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          of_product[i].v[j] += dy.v[j] * s.xhat.v[j];
          if (kCentered) of_dy[i].v[j] += dy.v[j];
        }
      });
    }
  }
  each([&](int i, int64_t col, int) {
    Elements sums;  // float32
    sums.data = part + blockIdx.x * p.k + col;
    store8(sums, 0, 8, true, of_product[i]);
    if (kCentered) store8(sums, stride, 8, true, of_dy[i]);
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

// Returns whether `blocks` thread blocks, one on an SM, keep at least two thirds of the SMs busy.
bool fills(int64_t blocks, int sms) { return sms > 0 && blocks * 3 >= ceil_div(blocks, sms) * sms * 2; }

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
  const int64_t chunks = ceil_div(p.m, kSumChunk), strips = sum_strips(p.k), stride = chunks * p.k;
  float* part = args.workspace.as<float>();
  bool summed = chunks == 0;
  DIPTYCH_TRY(launch_rows(p, [&](auto type, auto lanes, auto groups, int64_t blocks) {
    using T = typename decltype(type)::type;
    if constexpr (lanes == kThreads && groups > 0 && groups <= 4) {
      if (fills(chunks, device_info(exec.device.index).sm_count)) {
        summed = true;
        const auto kernel = p.centered ? chunk_grad_kernel<true, groups, T> : chunk_grad_kernel<false, groups, T>;
        return launch("norm_grad", kernel, chunks, kThreads, 0, exec.stream, p, part, stride);
      }
    }
    return launch("norm_grad", norm_grad_kernel<lanes, groups, T>, blocks, kThreads, 0, exec.stream, p);
  }));
  if (!summed) {
    DIPTYCH_TRY(with_rows(p, [&](auto type) {
      using T = typename decltype(type)::type;
      return launch("norm_grad", args.dbeta.given() ? parameter_kernel<2, T> : parameter_kernel<1, T>, chunks * strips,
                    kSumThreads, 0, exec.stream, p, static_cast<unsigned>(strips), part, stride);
    }));
  }
  return join_chunks("norm_grad", part, chunks, p.k, args.dgamma, args.dbeta, exec);
}

}  // namespace diptych::cuda
