// gemm: D = alpha * op(A) @ op(B) + bias + beta * C.
#include "diptych/gemm.h"

#include "cpu/base/run.h"
#include "cpu/gemm/product.h"

namespace diptych::cpu {

Status gemm(const GemmArgs& args, const Execution&) {
  return guarded("gemm", [&]() -> Status {
    Product p{};
    DIPTYCH_TRY(plan("gemm", args.a, args.b, p));
    p.m = args.d.rows(), p.n = args.d.cols();
    p.d = args.d.data, p.c = args.c.data, p.bias = args.bias.given() ? args.bias.data : nullptr;
    p.d_type = args.d.dtype, p.bias_type = args.bias.dtype;
    p.alpha = args.alpha, p.beta = args.beta;
    if (p.m > 0 && p.n > 0) multiply(p, p.work() >= kThreadedWork);
    return {};
  });
}

}  // namespace diptych::cpu
