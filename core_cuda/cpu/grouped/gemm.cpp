// grouped_gemm: a product for each group, with the same sums in the same order as gemm on the group alone.
#include <vector>

#include "cpu/base/run.h"
#include "cpu/gemm/product.h"
#include "cpu/grouped/offsets.h"
#include "diptych/grouped.h"

namespace diptych::cpu {
namespace {

Status run(const GroupedGemmArgs& args) {
  const bool depth = args.kind == GroupKind::depth;
  const int64_t groups = args.offsets.numel() - 1;
  Product all{};
  DIPTYCH_TRY(plan("grouped_gemm", args.a, depth ? args.b : slice(args.b, 0), all));
  const int64_t rows = depth ? all.k.length : all.a.outer;
  DIPTYCH_TRY(check_offsets("grouped_gemm", args.offsets, rows, args.align));
  all.m = all.a.outer, all.n = all.b.outer;
  all.d = args.d.data, all.c = args.c.data, all.d_type = args.d.dtype, all.bias_type = args.bias.dtype;
  all.alpha = args.alpha, all.beta = args.beta;

  std::vector<Product> small;  // products that are too small to be divided among threads
  int64_t work = 0;
  const auto add = [&](Product p) {
    if (p.m == 0 || p.n == 0) return;
    if (p.k.length == 0) {  // an empty sum is +0, whatever alpha and the amaxes are
      p.alpha = 0.0f;
      p.a.amax = p.b.amax = nullptr;
      p.a.amax_each = p.b.amax_each = false;
    }
    if (p.work() >= kThreadedWork) return multiply(p, true);
    work += p.work();
    small.push_back(p);
  };
  const int32_t* at = args.offsets.as<const int32_t>();
  for (int64_t g = 0; g < groups; ++g) {
    Product p = all;
    if (depth) {
      p.k = {at[g], at[g + 1] - at[g]};
      p.d = slice(args.d, g).data, p.c = slice(args.c, g).data;
    } else {
      p.b = operand(slice(args.b, g));
      p.m0 = at[g], p.m = at[g + 1] - at[g];
      p.bias = args.bias.given() ? slice(args.bias, g).data : nullptr;
    }
    add(p);
  }
  if (!depth) {
    const Part outside[] = {{0, at[0]}, {at[groups], rows - at[groups]}};
    for (const Part& part : outside) {
      Product p = all;
      p.m0 = part.begin, p.m = part.length, p.k = {0, 0};
      add(p);
    }
  }
  for_tasks(static_cast<int64_t>(small.size()), work >= kThreadedWork, [&](int64_t i) { multiply(small[i], false); });
  return {};
}

}  // namespace

Status grouped_gemm(const GroupedGemmArgs& args, const Execution&) {
  return guarded("grouped_gemm", [&] { return run(args); });
}

}  // namespace diptych::cpu
