// The simplest quantize kernel: a rowwise copy with one scale, encoded as a stream of elements.
#include "cuda/base/amax.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/vector.cuh"
#include "cuda/quantize/quantize.h"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 256, kUnroll = 4;

// q[i] = cast(x[i] * scale), NaN where x[i] is infinite. `vec`: x is aligned to 16 bytes, and q to the number of
// elements in 16 bytes of x.
template <typename T, bool kE5M2>
__global__ void __launch_bounds__(kThreads)
    stream_kernel(const T* __restrict__ x, int64_t n, TensorScale from, uint8_t* __restrict__ q,
                  float* __restrict__ scale_inv, DivideRule rule, bool vec) {
  constexpr int kN = Vec<T>::kCount;
  constexpr int64_t kPerBlock = static_cast<int64_t>(kThreads) * kUnroll * kN;
  const float scale = from.scale ? *from.scale : scale_from_amax(rule, *from.amax);
  float m = 0.0f;
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = reciprocal_rn(scale);

  // Last blocks first: the amax pass has just left the end of x in L2.
  const int64_t begin = static_cast<int64_t>(gridDim.x - 1 - blockIdx.x) * kPerBlock;
  if (vec && begin + kPerBlock <= n) {
    const int64_t first = begin + static_cast<int64_t>(threadIdx.x) * kN;
    Vec<T> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = Vec<T>::load(x + first + u * kThreads * kN);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      v[u] = without_inf(v[u]);
      if (from.join) m = max_abs(m, v[u]);
      float y[kN];
#pragma unroll
      for (int i = 0; i < kN; ++i) y[i] = multiply_rn(v[u][i], scale);
      uint8_t* p = q + first + u * kThreads * kN;
      const uint32_t lo = encode4<kE5M2>(y[0], y[1], y[2], y[3]);
      if constexpr (kN == 4) {
        *reinterpret_cast<uint32_t*>(p) = lo;
      } else {
        *reinterpret_cast<uint2*>(p) = make_uint2(lo, encode4<kE5M2>(y[4], y[5], y[6], y[7]));
      }
    }
  } else {
    const int64_t end = begin + kPerBlock < n ? begin + kPerBlock : n;
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
      const float v = without_inf(to_float(x[i]));
      m = max_abs(m, v);
      q[i] = encode<kE5M2>(multiply_rn(v, scale));
    }
  }
  __shared__ float scratch[kThreads / 32];
  if (from.join) join_amax<kThreads>(m, scratch, from.join);
}

}  // namespace

bool quantize_stream_fits(const QuantizeArgs& args) {
  return !args.columnwise.given() && args.source.kind == SourceKind::plain;
}

Status quantize_stream(const QuantizeArgs& args, const Execution& exec) {
  return with_float_type(args.x.dtype, "quantize", [&](auto type) {
    return with_element(row(args.spec.format).element, "quantize", [&](auto e5m2) {
      using T = decltype(type);
      constexpr int kN = Vec<T>::kCount;
      const T* x = args.x.as<const T>();
      uint8_t* q = args.rowwise.data.as<uint8_t>();
      const int64_t n = args.x.numel();
      const int64_t blocks = ceil_div(n, static_cast<int64_t>(kThreads) * kUnroll * kN);
      // At least one block, because an empty tensor has a scale too.
      return launch("quantize", stream_kernel<T, e5m2.value>, blocks > 0 ? blocks : 1, kThreads, 0, exec.stream, x, n,
                    tensor_scale(args), q, args.rowwise.scale_inv.as<float>(), divide_rule(args),
                    aligned(x, 16) && aligned(q, kN));
    });
  });
}

}  // namespace diptych::cuda
