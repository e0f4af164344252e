// log_amax and scale_update: delayed scaling's update of histories and scales, with a thread block for each tensor.
// Outputs may be the inputs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/base/launch.cuh"
#include "cuda/base/vector.cuh"
#include "diptych/many.h"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 256;

struct UpdateArgs {
  const float* history;  // [n, length], a row for each thread block
  const float* scale;    // [n]
  const float* reduced;  // [n], or null
  const float* amax;     // [n], or null
  const int64_t* seen;   // [1], or null
  const int64_t* step;   // [1], with seen
  float* pending;        // [n], or null
  const float* log;      // [n, columns], or null
  const int64_t* written;
  int64_t* taken;  // [n]
  int64_t columns;
  float* new_history;
  float* new_scale;
  float* scale_out;  // [n], or null
  int64_t length;
  float top;  // the element's largest value / 2^margin
  bool most_recent;
};

__device__ float warp_max(float m) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, mask));
  return m;
}

__device__ void write_scale(const UpdateArgs& p, int64_t tensor, float scale) {
  p.new_scale[tensor] = scale;
  if (p.scale_out) p.scale_out[tensor] = scale;
}

// Raises history[., 0] to the amaxes in pending and log. One warp calls it.
__device__ void take(const UpdateArgs& p, int64_t tensor) {
  float m = p.new_history[tensor * p.length];
  if (p.pending) m = fmaxf(m, p.pending[tensor]);
  if (p.log) {
    const int64_t written = *p.written, taken = p.taken[tensor];
    if (taken < 0 || written < taken) {  // otherwise the next difference could overflow
      if (threadIdx.x == 0)
        printf("diptych: scale_update: taken is %lld and written %lld; counts of logged amaxes lie in 0..written\n",
               static_cast<long long>(taken), static_cast<long long>(written));
      __trap();
    }
    if (written - taken > p.columns) {
      if (threadIdx.x == 0)
        printf("diptych: scale_update: %lld amaxes were logged since the last update, and the log holds %lld\n",
               static_cast<long long>(written - taken), static_cast<long long>(p.columns));
      __trap();
    }
    for (int64_t i = taken + threadIdx.x; i < written; i += 32) m = fmaxf(m, p.log[tensor * p.columns + i % p.columns]);
    m = warp_max(m);
    if (threadIdx.x == 0) p.taken[tensor] = written;
  }
  if (threadIdx.x != 0) return;
  if (p.pending) p.pending[tensor] = 0.0f;
  p.new_history[tensor * p.length] = m;
}

// The work of one thread block: updates one tensor.
__device__ __forceinline__ void update(const UpdateArgs& p, int64_t tensor) {
  const float* from = p.history + tensor * p.length;
  float* to = p.new_history + tensor * p.length;
  if (p.pending || p.log) {
    if (threadIdx.x < 32) take(p, tensor);
    __syncthreads();
  }
  if (p.seen && *p.seen == *p.step) {  // already updated in this step; all blocks agree on that
    if (to != from)
      for (int64_t i = threadIdx.x; i < p.length; i += kThreads) to[i] = from[i];
    if (threadIdx.x == 0) write_scale(p, tensor, p.scale[tensor]);
    return;
  }
  const float reduced = p.reduced ? p.reduced[tensor] : 0.0f;
  const float last = reduced != 0.0f ? reduced : from[0];
  const bool rolls = last != 0.0f;

  float m = last;
  for (int64_t begin = 0; begin < p.length; begin += kThreads) {
    const int64_t i = begin + threadIdx.x;
    float v = 0.0f;
    if (i < p.length) {
      v = !rolls ? from[i] : i + 1 < p.length ? from[i + 1] : last;
      m = fmaxf(m, v);  // fmaxf ignores NaN; m is not used without a roll
      if (rolls && i == 0) v = 0.0f;
    }
    __syncthreads();  // in place: all threads have read what this step overwrites, and from[0]
    if (i < p.length) to[i] = v;
  }

  __shared__ float scratch[kThreads / 32];
  m = warp_max(m);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = m;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int w = 1; w < kThreads / 32; ++w) m = fmaxf(m, scratch[w]);
  const float old = p.scale[tensor];
  const float amax = p.amax ? p.amax[tensor] : p.most_recent ? last : m;
  write_scale(p, tensor, rolls ? next_scale(amax, p.top, old) : old);
}

__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ UpdateArgs p) {
  update(p, blockIdx.x);
}

// Updates of several calls, one for each thread block.
template <int kMost>
struct Updates {
  UpdateArgs of[kMost];
  int64_t tensor[kMost];
};

template <int kMost>
__global__ void __launch_bounds__(kThreads) update_many_kernel(const __grid_constant__ Updates<kMost> many) {
  update(many.of[blockIdx.x], many.tensor[blockIdx.x]);
}

__global__ void log_kernel(const float* amax, int n, float* log, int64_t columns, int64_t* written) {
  const int64_t number = *written;
  if (number < 0 || number == INT64_MAX) {
    if (threadIdx.x == 0)
      printf("diptych: log_amax: written is %lld, and counts of logged amaxes lie in 0..2^63-2\n",
             static_cast<long long>(number));
    __trap();
  }
  for (int t = threadIdx.x; t < n; t += 32) log[t * columns + number % columns] = amax[t];
  __syncwarp();
  if (threadIdx.x == 0) *written = number + 1;
}

UpdateArgs update_args(const ScaleUpdateArgs& args) {
  UpdateArgs p{};
  p.history = args.history.as<const float>(), p.scale = args.scale.as<const float>();
  if (args.reduced.given()) p.reduced = args.reduced.as<const float>();
  if (args.amax.given()) p.amax = args.amax.as<const float>();
  if (args.seen.given()) p.seen = args.seen.as<const int64_t>(), p.step = args.step.as<const int64_t>();
  if (args.pending.given()) p.pending = args.pending.as<float>();
  if (args.log.given()) {
    p.log = args.log.amaxes.as<const float>(), p.written = args.log.written.as<const int64_t>();
    p.taken = args.taken.as<int64_t>(), p.columns = args.log.amaxes.cols();
  }
  if (args.scale_out.given()) p.scale_out = args.scale_out.as<float>();
  p.new_history = args.new_history.as<float>(), p.new_scale = args.new_scale.as<float>();
  p.length = args.history.cols(), p.most_recent = args.most_recent;
  p.top = args.fp8_max * std::ldexp(1.0f, -args.margin);
  return p;
}

}  // namespace

Status log_amax(const LogAmaxArgs& args, const Execution& exec) {
  return launch("log_amax", log_kernel, 1, 32, 0, exec.stream, args.amax.as<const float>(),
                static_cast<int>(args.amax.numel()), args.log.amaxes.as<float>(), args.log.amaxes.cols(),
                args.log.written.as<int64_t>());
}

Status scale_update(const ScaleUpdateArgs& args, const Execution& exec) {
  const int64_t n = args.history.rows();
  if (n == 0) return {};
  return launch("scale_update", update_kernel, n, kThreads, 0, exec.stream, update_args(args));
}

Status scale_update_many(const ScaleUpdateManyArgs& args, const Execution& exec) {
  std::vector<std::pair<UpdateArgs, int64_t>> updates;
  for (const ScaleUpdateArgs& one : args.each)
    for (int64_t tensor = 0; tensor < one.history.rows(); ++tensor) updates.emplace_back(update_args(one), tensor);
  // Drivers since CUDA 12.1 take 32764 bytes of arguments, older ones 4096.
  constexpr int kFew = 28, kAll = 220;
  int driver = 0;
  DIPTYCH_CUDA_TRY(cudaDriverGetVersion(&driver));
  const auto launch_some = [&]<int kMost>(std::integral_constant<int, kMost>) -> Status {
    for (size_t begin = 0; begin < updates.size(); begin += kMost) {
      Updates<kMost> some{};
      const size_t count = std::min<size_t>(kMost, updates.size() - begin);
      for (size_t i = 0; i < count; ++i) std::tie(some.of[i], some.tensor[i]) = updates[begin + i];
      DIPTYCH_TRY(launch("scale_update_many", update_many_kernel<kMost>, static_cast<int64_t>(count), kThreads, 0,
                         exec.stream, some));
    }
    return {};
  };
#if CUDART_VERSION >= 12010
  if (updates.size() > kFew && driver >= 12010) return launch_some(std::integral_constant<int, kAll>());
#endif
  return launch_some(std::integral_constant<int, kFew>());
}

}  // namespace diptych::cuda
