// grouped_bias_grad: the column sums of each group, each in ascending row order, as in bias_grad.
#include <algorithm>
#include <cstring>

#include "cpu/base/run.h"
#include "cpu/grouped/offsets.h"
#include "cpu/isa/isa.h"
#include "diptych/grouped.h"

namespace diptych::cpu {

Status grouped_bias_grad(const GroupedBiasGradArgs& args, const Execution&) {
  return guarded("grouped_bias_grad", [&]() -> Status {
    const Kernels& simd = kernels();
    const TensorView &dy = args.dy, &out = args.out;
    const int64_t m = dy.rows(), n = dy.cols();
    DIPTYCH_TRY(check_offsets("grouped_bias_grad", args.offsets, m));
    const int32_t* at = args.offsets.as<const int32_t>();
    constexpr int64_t kStrip = 512;  // its sums stay in the first-level cache
    const int64_t groups = args.offsets.numel() - 1, strips = ceil_div(n, kStrip);
    for_tasks(groups * strips, m * n >= kThreadedElements, [&](int64_t i) {
      const int64_t g = i / strips, first = i % strips * kStrip, width = std::min(kStrip, n - first);
      alignas(64) float acc[kStrip];
      std::memset(acc, 0, sizeof(acc));
      const char* rows = dy.as<const char>() + (at[g] * n + first) * bytes(dy.dtype);
      sum_rows_into(acc, dy.dtype, rows, n, at[g + 1] - at[g], width);
      simd.store(out.dtype, acc, width, out.as<char>() + (g * n + first) * bytes(out.dtype));
    });
    return {};
  });
}

}  // namespace diptych::cpu
