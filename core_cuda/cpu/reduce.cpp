// amax and bias_grad.
#include "cpu/reduce.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "cpu/run.h"
#include "cpu/scratch.h"

namespace diptych::cpu {

float amax_of(const TensorView& x) {
  const Kernels& simd = kernels();
  const int64_t n = x.numel();
  const char* data = x.as<const char>();
  if (n < kThreadedElements) return simd.amax(x.dtype, data, n);
  constexpr int64_t kChunk = 1 << 16;
  std::vector<float> part(ceil_div(n, kChunk));
  parallel_for(static_cast<int64_t>(part.size()), [&](int64_t i) {
    part[i] = simd.amax(x.dtype, data + i * kChunk * bytes(x.dtype), std::min(kChunk, n - i * kChunk));
  });
  return *std::max_element(part.begin(), part.end());
}

Status amax(const AmaxArgs& args, const Execution&) {
  return guarded("amax", [&] {
    *args.out.as<float>() = amax_of(args.x);
    return Status();
  });
}

// Threads split columns only: each column is summed in ascending row order.
Status bias_grad(const BiasGradArgs& args, const Execution&) {
  return guarded("bias_grad", [&] {
    const Kernels& simd = kernels();
    const TensorView &dy = args.dy, &out = args.out;
    const int64_t m = dy.rows(), n = dy.cols();
    constexpr int64_t kStrip = 512;  // its sums stay in the first-level cache
    for_tasks(ceil_div(n, kStrip), m * n >= kThreadedElements, [&](int64_t i) {
      const int64_t first = i * kStrip, width = std::min(kStrip, n - first);
      alignas(64) float acc[kStrip];
      std::memset(acc, 0, sizeof(acc));
      simd.column_sum(dy.dtype, dy.as<const char>() + first * bytes(dy.dtype), n, m, width, acc);
      simd.store(out.dtype, acc, width, out.as<char>() + first * bytes(out.dtype));
    });
    return Status();
  });
}

}  // namespace diptych::cpu
