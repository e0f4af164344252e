// The amax of a source's values. Nearly all values need not be computed: if a bound that needs no exponential is not
// above the maximum found so far, neither are the values.
#include <algorithm>

#include "cuda/base/amax.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/quantize/quantize.h"
#include "cuda/source/lanes.cuh"

namespace diptych::cuda {
namespace {

struct SourceAmaxArgs {
  SourceArgs in;
  Lanes lanes;
  float *out, *also;  // either may be null; they must hold 0
};

template <typename In>
__device__ __forceinline__ float row_amax(const SourceArgs& p, const Reader<In, true>& source, int i,
                                          const typename Reader<In, true>::Raw& raw) {
  float m = 0.0f;
  if constexpr (kTypedGrad<In>) {
    Floats8 y[2];
    source.both(raw, y);
    m = max_abs(m, without_inf(y[0]));
    return p.gated ? max_abs(m, without_inf(y[1])) : m;
  } else {
    return max_abs(m, without_inf(source.values(i, raw)));
  }
}

// Rows that are loaded at once.
template <typename In>
constexpr int kUnroll = 1;
template <SourceKind kKind, typename T>
constexpr int kUnroll<Typed<kKind, T>> = (kKind == SourceKind::activation_grad ? 2 : 4) / (sizeof(T) == 4 ? 2 : 1);

template <typename In>
__global__ void __launch_bounds__(kLaneThreads, kTyped<In> ? 3 : 1)
    source_amax_kernel(const __grid_constant__ SourceAmaxArgs p) {
  __shared__ float scratch[2][kLaneThreads / 32];
  float m = 0.0f;
  using Source = Reader<In, true>;
  const int64_t row0 = p.lanes.first_row(), left = p.in.m - row0, rows = left < p.lanes.rows ? left : p.lanes.rows;
  const int down = p.lanes.down();
  const Source source(p.in, p.lanes.row(), p.lanes.col(), down);
  for (int i = 0; static_cast<int64_t>(i) * down < rows; i += kUnroll<In>) {  // the same number of times in all threads
    typename Source::Raw raw[kUnroll<In>];
#pragma unroll
    for (int u = 0; u < kUnroll<In>; ++u) raw[u] = source.load(i + u);
    if constexpr (!Source::kBounds) {
#pragma unroll
      for (int u = 0; u < kUnroll<In>; ++u) m = fmaxf(m, row_amax<In>(p.in, source, i + u, raw[u]));
    } else {
      float bound = 0.0f;
#pragma unroll
      for (int u = 0; u < kUnroll<In>; ++u) bound = fmaxf(bound, source.bound(raw[u]));
      if (!__any_sync(kAllLanes, bound > m)) continue;
#pragma unroll 1
      for (int u = 0; u < kUnroll<In>; ++u) m = fmaxf(m, row_amax<In>(p.in, source, i + u, source.load(i + u)));
      // Sharing the maximum found so far saves other threads work.
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, mask));
      float *cell = p.out ? p.out : p.also, known = 0.0f;
      if (threadIdx.x % 32 == 0) {
        known = *static_cast<const volatile float*>(cell);
        if (m > known) atomicMax(reinterpret_cast<int*>(cell), static_cast<int>(bits_of(m)));
      }
      m = fmaxf(m, __shfl_sync(kAllLanes, known, 0));
    }
  }
  if (p.out) join_amax<kLaneThreads>(m, scratch[0], p.out);
  if (p.also) join_amax<kLaneThreads>(m, scratch[1], p.also);
}

}  // namespace

Status source_amax(const AmaxArgs& args, const Execution& exec) {
  SourceAmaxArgs p{source_args(args.x, args.source), {}, args.out.as<float>(), args.columnwise_out.as<float>()};
  const int64_t wanted = std::max(1, device_info(exec.device.index).sm_count) * 6;
  return with_any_source(p.in, [&](auto type) {
    using In = decltype(type);
    p.lanes = lanes_of<In>(p.in, kUnroll<In>, wanted);
    return launch("amax", source_amax_kernel<In>, p.lanes.blocks, kLaneThreads, 0, exec.stream, p);
  });
}

}  // namespace diptych::cuda
