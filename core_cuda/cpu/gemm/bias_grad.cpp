// The bias gradient: sums over rows.
#include <algorithm>
#include <cstring>

#include "cpu/base/run.h"
#include "cpu/isa/isa.h"
#include "diptych/gemm.h"

namespace diptych::cpu {

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
      sum_rows_into(acc, dy.dtype, dy.as<const char>() + first * bytes(dy.dtype), n, m, width);
      simd.store(out.dtype, acc, width, out.as<char>() + first * bytes(out.dtype));
    });
    return Status();
  });
}

}  // namespace diptych::cpu
