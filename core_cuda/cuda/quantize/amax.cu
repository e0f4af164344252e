// Maxima over finite |x|: of the tensor, of its rows, and of its Hadamard transform, from one read.
#include <algorithm>

#include "cuda/base/amax.cuh"
#include "cuda/base/hadamard.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/vector.cuh"
#include "cuda/quantize/many.cuh"
#include "cuda/quantize/quantize.h"
#include "cuda/source/source.cuh"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kUnroll = 4;
constexpr int kStripThreads = 128, kStripWarps = kStripThreads / 32;

// Returns the maximum of the part of x that block `block` of `blocks` reads: `head` elements up to a 16-byte boundary,
// then vectors, then a tail.
template <typename T>
__device__ __forceinline__ float flat_max(const T* __restrict__ x, int64_t n, int head, unsigned block,
                                          unsigned blocks) {
  constexpr int kN = Vec<T>::kCount;
  const int tid = threadIdx.x;
  const int64_t vectors = (n - head) / kN;
  float m = 0.0f;

  const int64_t stride = static_cast<int64_t>(blocks) * kThreads * kUnroll;
  for (int64_t first = static_cast<int64_t>(block) * kThreads * kUnroll + tid; first < vectors; first += stride) {
    Vec<T> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kThreads < vectors) v[u] = Vec<T>::load(x + head + (first + u * kThreads) * kN);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) m = max_abs(m, without_inf(v[u]));
  }
  if (block == 0) {
    if (tid < head) m = max_abs(m, without_inf(to_float(x[tid])));
    const int64_t tail = head + vectors * kN + tid;
    if (tail < n) m = max_abs(m, without_inf(to_float(x[tail])));
  }
  return m;
}

// `also`: a second output for the same result, or null.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    flat_kernel(const T* __restrict__ x, int64_t n, int head, float* out, float* also) {
  const float m = flat_max(x, n, head, blockIdx.x, gridDim.x);
  __shared__ float scratch[2][kWarps];
  if (out) join_amax<kThreads>(m, scratch[0], out);
  if (also) join_amax<kThreads>(m, scratch[1], also);
}

// Returns the number of elements up to a 16-byte boundary.
template <typename T>
__host__ __device__ __forceinline__ int head_of(const T* x, int64_t n) {
  const int past = static_cast<int>(reinterpret_cast<uintptr_t>(x) % 16), head = (16 - past) % 16 / int{sizeof(T)};
  return n < head ? static_cast<int>(n) : head;
}

// The maximum of each tensor of a stack; `each` blocks read one tensor.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    flat_stack_kernel(const T* __restrict__ stack, int64_t n, unsigned each, float* out) {
  const unsigned g = blockIdx.x / each;
  const T* x = stack + g * n;
  const float m = flat_max(x, n, head_of(x, n), blockIdx.x - g * each, each);
  __shared__ float scratch[kWarps];
  join_amax<kThreads>(m, scratch, out + g);
}

// One of many tensors: `blocks` thread blocks read it.
struct ManyFlat {
  const void* x;
  int64_t n;
  float* out;
  unsigned blocks;
};

template <typename T>
__global__ void __launch_bounds__(kThreads) flat_many_kernel(const __grid_constant__ Table<ManyFlat> many) {
  const int which = tensor_of(many, blockIdx.x);
  const ManyFlat& one = many.of[which];
  const T* x = static_cast<const T*>(one.x);
  const float m = flat_max(x, one.n, head_of(x, one.n), blockIdx.x - many.first[which], one.blocks);
  __shared__ float scratch[kWarps];
  join_amax<kThreads>(m, scratch, one.out);
}

__global__ void clear_kernel(const __grid_constant__ Table<float*> many) {
  if (threadIdx.x == 0) *many.of[blockIdx.x] = 0.0f;
}

__device__ __forceinline__ Row8<__nv_bfloat16> as_bf16(const Row8<__nv_bfloat16>& x) { return x; }
__device__ __forceinline__ Row8<__nv_bfloat16> as_bf16(const Row8<float>& x) {
  Row8<__nv_bfloat16> r;
#pragma unroll
  for (int w = 0; w < 4; ++w) r.v[0].w[w] = pack2<__nv_bfloat16>(x[2 * w], x[2 * w + 1]);
  return r;
}

// Returns the largest finite value of the transforms of eight columns after each value is rounded. It is called rarely,
// so it may read its input again.
template <typename In>
__device__ __noinline__ float largest_rounded(const SourceArgs& p, int64_t row, int64_t col, bool signs) {
  const Reader<In> source(p, row, col);
  Row8<__nv_bfloat16> x[kHadamard];
#pragma unroll 1
  for (int i = 0; i < kHadamard; ++i) x[i] = as_bf16(source.row(i, source.load(i)));
  float m = 0.0f;
#pragma unroll 1
  for (int j = 0; j < 8; ++j) {
    float z[kHadamard];
#pragma unroll
    for (int i = 0; i < kHadamard; ++i) z[i] = to_float(reinterpret_cast<const __nv_bfloat16*>(x + i)[j]);
    hadamard16(z, signs);
#pragma unroll
    for (int i = 0; i < kHadamard; ++i) m = max_abs(m, without_inf(through_bf16(z[i])));
  }
  return m;
}

struct StripArgs {
  SourceArgs in;
  unsigned strips_m, strips_k;
  float* rows;        // [m], or null
  float* tensor;      // [1], or null
  float* columnwise;  // [1], with kRht the transform's; or null
  bool rht_signs;
};

// A thread owns 16 rows x 8 columns, a warp 256 columns, so that a thread holds whole transforms; it keeps their input
// as bfloat16. A block's warps lie side by side. For Gathered input they lie one below the other, and the grid walks
// down all rows in so few columns that a token's other rows find its elements in L2.
template <typename In, bool kRht>
__global__ void __launch_bounds__(kStripThreads, kComputed<In> ? 512 / kStripThreads : 0)
    strip_kernel(const __grid_constant__ StripArgs p) {
  const int lane = threadIdx.x % 32;
  constexpr bool kDown = std::is_same_v<In, Gathered>;
  const unsigned at_k = kDown ? blockIdx.x / p.strips_m : blockIdx.x % p.strips_k;
  const unsigned at_m =
      kDown ? (blockIdx.x - at_k * p.strips_m) * kStripWarps + threadIdx.x / 32 : blockIdx.x / p.strips_k;
  const int64_t row = static_cast<int64_t>(at_m) * kHadamard;
  const int64_t col = (static_cast<int64_t>(at_k) * (kDown ? 32 : kStripThreads) + (kDown ? lane : threadIdx.x)) * 8;
  Row8<__nv_bfloat16> held[kHadamard];
  float of_row[kHadamard], all = 0.0f;
  const Reader<In> source(p.in, row, col);
  each_row<kHadamard>(source, [&](int i, const auto& raw) {
    const auto x = source.row(i, raw);
    of_row[i] = max_finite(x);
    if constexpr (kRht) held[i] = as_bf16(x);
  });
#pragma unroll
  for (int i = 0; i < kHadamard; ++i) all = fmaxf(all, of_row[i]);
  if (p.rows) {
    max_and_halve<8>(of_row, lane, 16), max_and_halve<4>(of_row, lane, 8), max_and_halve<2>(of_row, lane, 4);
    max_and_halve<1>(of_row, lane, 2);
    const float m = fmaxf(of_row[0], __shfl_xor_sync(kAllLanes, of_row[0], 1));
    const int64_t mine = row + lane / 2;
    if (lane % 2 == 0 && mine < p.in.m && m > 0.0f) {
      atomicMax(reinterpret_cast<int*>(p.rows + mine), static_cast<int>(bits_of(m)));
    }
  }
  __shared__ float scratch[2][kStripWarps];
  if constexpr (kRht) {
    float m = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float z[kHadamard];
#pragma unroll
      for (int i = 0; i < kHadamard; ++i) z[i] = held[i][j];
      hadamard16(z, p.rht_signs);
#pragma unroll
      for (int i = 0; i < kHadamard; ++i) m = max_abs(m, z[i]);
    }
    // Rounding is monotonic: the largest rounded value is the largest value, rounded. If that is infinite, it does not
    // count, and each value has to be rounded.
    m = through_bf16(m);
    if (rarely(m == INFINITY)) m = largest_rounded<In>(p.in, row, col, p.rht_signs);
    join_amax<kStripThreads>(m, scratch[1], p.columnwise);
  } else if (p.columnwise) {
    join_amax<kStripThreads>(all, scratch[1], p.columnwise);
  }
  if (p.tensor) join_amax<kStripThreads>(all, scratch[0], p.tensor);
}

template <bool kRht>
Status run_strips(const AmaxArgs& args, const Execution& exec) {
  StripArgs p{};
  p.in = source_args(args.x, args.source);
  p.rht_signs = (args.flags & kRhtSigns) != 0;
  if (args.out.given()) (args.flags & kRowAmax ? p.rows : p.tensor) = args.out.as<float>();
  if (args.columnwise_out.given()) p.columnwise = args.columnwise_out.as<float>();
  const auto run = [&](auto type) {
    using In = decltype(type);
    constexpr bool kDown = std::is_same_v<In, Gathered>;
    const int64_t strips_m = ceil_div(p.in.m, kDown ? kHadamard * kStripWarps : kHadamard);
    const int64_t strips_k = ceil_div(p.in.k, kDown ? 32 * 8 : kStripThreads * 8), strips = strips_m * strips_k;
    p.strips_m = static_cast<unsigned>(strips_m), p.strips_k = static_cast<unsigned>(strips_k);
    // The transform takes bfloat16; amax() refuses other plain inputs before.
    if constexpr (kRht && !kComputed<In> && !std::is_same_v<Held<In>, __nv_bfloat16>) {
      return Status(Code::type, "amax: the Hadamard transform takes bfloat16 alone");
    } else {
      return launch("amax", strip_kernel<In, kRht>, strips, kStripThreads, 0, exec.stream, p);
    }
  };
  const bool gathered = p.in.kind == SourceKind::permuted && p.in.vec && p.in.x.type == DType::bf16;
  return gathered ? run(Gathered{}) : with_input_type(p.in, "amax", run);
}

template <typename T>
int64_t flat_blocks(int64_t n) {
  return std::max<int64_t>(1, ceil_div(n / Vec<T>::kCount, kThreads * kUnroll));
}
int64_t most_blocks(const Execution& exec) { return int64_t{8} * std::max(1, device_info(exec.device.index).sm_count); }

Status run_flat(const AmaxArgs& args, const Execution& exec) {
  return with_float_type(args.x.dtype, "amax", [&](auto type) {
    using T = decltype(type);
    const T* x = args.x.as<const T>();
    const int64_t n = args.x.numel();
    const int head = head_of(x, n);
    const int64_t blocks = std::min(flat_blocks<T>(n - head), most_blocks(exec));
    return launch("amax", flat_kernel<T>, blocks, kThreads, 0, exec.stream, x, n, head, args.out.as<float>(),
                  args.columnwise_out.as<float>());
  });
}

}  // namespace

Status clear_amax(const TensorView& amax, const Execution& exec) {
  DIPTYCH_CUDA_TRY(cudaMemsetAsync(amax.data, 0, amax.numel() * sizeof(float), static_cast<cudaStream_t>(exec.stream)));
  return {};
}

// Either output may be missing: quantize passes only those of the copies that it writes.
Status amax(const AmaxArgs& args, const Execution& exec) {
  for (const TensorView* out : {&args.out, &args.columnwise_out}) {
    if (!out->given() || out->numel() == 0) continue;
    DIPTYCH_TRY(clear_amax(*out, exec));
  }
  const Extent e = encoded_extent(args.x, args.source);
  if (args.x.numel() == 0 || e.rows * e.cols == 0) return {};
  if (args.columnwise_out.given() && (args.flags & kRht)) {
    if (args.x.dtype == DType::bf16) return run_strips<true>(args, exec);
    return {Code::type, std::string("amax: the Hadamard transform takes bfloat16 alone, not ") + name(args.x.dtype)};
  }
  if (args.out.given() && (args.flags & kRowAmax)) return run_strips<false>(args, exec);
  if (args.source.kind == SourceKind::permuted) return permuted_amax(args, exec);
  if (args.source.kind != SourceKind::plain) return source_amax(args, exec);
  return run_flat(args, exec);
}

Status amax_stack(const TensorView& x, const TensorView& out, const Execution& exec) {
  const int64_t count = x.shape[0], n = x.numel() / count;
  DIPTYCH_TRY(clear_amax(out, exec));
  return with_float_type(x.dtype, "quantize_stack", [&](auto type) {
    using T = decltype(type);
    const int64_t each = std::min(flat_blocks<T>(n), std::max<int64_t>(1, most_blocks(exec) / count));
    return launch("quantize_stack", flat_stack_kernel<T>, count * each, kThreads, 0, exec.stream, x.as<const T>(), n,
                  static_cast<unsigned>(each), out.as<float>());
  });
}

Status clear_amaxes(std::span<const QuantizeArgs> calls, const Execution& exec) {
  return launch_many(
      "quantize_many", clear_kernel, calls, 32, exec, [](const QuantizeArgs& one) { return one.amax.as<float>(); },
      [](float*) { return int64_t{1}; });
}

Status amax_many(std::span<const QuantizeArgs> calls, const Execution& exec) {
  DIPTYCH_TRY(clear_amaxes(calls, exec));
  int64_t total = 0;
  for (const QuantizeArgs& one : calls) total += one.x.numel();
  return with_float_type(calls.front().x.dtype, "quantize_many", [&](auto type) {
    using T = decltype(type);
    // Each tensor gets thread blocks by its share of the elements.
    const auto describe = [&](const QuantizeArgs& one) {
      const int64_t n = one.x.numel();
      const double share = static_cast<double>(most_blocks(exec)) * static_cast<double>(n) / static_cast<double>(total);
      const int64_t blocks = std::clamp<int64_t>(static_cast<int64_t>(share), 1, flat_blocks<T>(n));
      return ManyFlat{one.x.data, n, one.amax.as<float>(), static_cast<unsigned>(blocks)};
    };
    return launch_many("quantize_many", flat_many_kernel<T>, calls, kThreads, exec, describe,
                       [](const ManyFlat& one) { return int64_t{one.blocks}; });
  });
}

}  // namespace diptych::cuda
