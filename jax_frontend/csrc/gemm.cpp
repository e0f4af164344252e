// The XLA handlers of products and of the bias gradient.
#include <string>

#include "handler.h"

namespace diptych::xla_ffi {

// a data, a scale_inv, [a amax], b data, b scale_inv, [b amax], [bias], [c] -> d, [workspace: CUDA]
Status run(Call& call, const GemmAttributes& d) {
  return call.each([&] {
    Buffers t(call);
    const auto operand = [&](int32_t format, int32_t columnwise, int32_t has_amax) {
      const TensorView data = t.in(), scale_inv = t.in();
      return copy(format, columnwise != 0, data, scale_inv, t.in(has_amax));
    };
    GemmArgs g;
    g.a = operand(d.a_format, d.a_columnwise, d.a_has_amax);
    g.b = operand(d.b_format, d.b_columnwise, d.b_has_amax);
    g.bias = t.in(d.has_bias);
    g.c = t.in(d.has_c);
    g.d = t.out();
    g.workspace = t.out();
    g.alpha = d.alpha;
    g.beta = d.beta;
    g.options = gemm_options(d);
    return gemm(g, call.exec());
  });
}

// dy -> out, [workspace: CUDA]
Status run(Call& call, const BiasGradAttributes&) {
  return call.each([&] { return bias_grad(BiasGradArgs{call.in(0), call.out(0), call.out(1)}, call.exec()); });
}

}  // namespace diptych::xla_ffi

DIPTYCH_HANDLERS(gemm, GemmAttributes);
DIPTYCH_HANDLERS(bias_grad, BiasGradAttributes);
