// The XLA handlers of the ops on stacks and on groups of rows.
#include "diptych/grouped.h"

#include "handler.h"

namespace diptych::xla_ffi {

// x, [amax, columnwise_amax: where given], [scale], [rng]
//   -> [rowwise data, scale_inv], [columnwise data, scale_inv], [amax, columnwise_amax: where not given]
Status run(Call& call, const QuantizeStackAttributes& d) {
  return call.each([&] {
    Buffers t(call);
    QuantizeArgs a;
    a.x = t.in();
    a.spec = {static_cast<FormatId>(d.format), d.flags, d.eps};
    a.amax_mode = static_cast<AmaxMode>(d.amax_mode);
    for (QuantizedView* q : {&a.rowwise, &a.columnwise}) {
      const bool columnwise = q == &a.columnwise;
      if ((columnwise ? d.columnwise : d.rowwise) == 0) continue;
      const TensorView data = t.out();
      *q = copy(static_cast<int32_t>(copy_format(a.spec, columnwise)), columnwise, data, t.out());
    }
    const bool given = a.amax_mode == AmaxMode::given;
    a.amax = given ? t.in(d.has_amax) : t.out(d.has_amax);
    a.columnwise_amax = given ? t.in(d.has_columnwise_amax) : t.out(d.has_columnwise_amax);
    a.scale = t.in(d.has_scale);
    a.rng = t.in(d.has_rng);
    return quantize_stack({a}, call.exec());
  });
}

// a data, a scale_inv, [a amax], b data, b scale_inv, [b amax], offsets, [bias], [c] -> d, [workspace: CUDA, some
// formats]
Status run(Call& call, const GroupedGemmAttributes& d) {
  return call.each([&] {
    Buffers t(call);
    const auto operand = [&](int32_t format, int32_t columnwise, int32_t has_amax) {
      const TensorView data = t.in(), scale_inv = t.in();
      return copy(format, columnwise != 0, data, scale_inv, t.in(has_amax));
    };
    GroupedGemmArgs g;
    g.a = operand(d.a_format, d.a_columnwise, d.a_has_amax);
    g.b = operand(d.b_format, d.b_columnwise, d.b_has_amax);
    g.offsets = t.in();
    g.bias = t.in(d.has_bias);
    g.c = t.in(d.has_c);
    g.d = t.out();
    g.workspace = t.out();
    g.kind = static_cast<GroupKind>(d.kind);
    g.align = d.align;
    g.rotated = d.rotated != 0;
    g.alpha = d.alpha;
    g.beta = d.has_c != 0 ? 1.0f : 0.0f;
    g.options = gemm_options(d);
    return grouped_gemm(g, call.exec());
  });
}

// dy, offsets -> out, [workspace: CUDA]
Status run(Call& call, const GroupedBiasGradAttributes&) {
  return call.each([&] { return grouped_bias_grad({call.in(0), call.in(1), call.out(0), call.out(1)}, call.exec()); });
}

}  // namespace diptych::xla_ffi

DIPTYCH_HANDLERS(quantize_stack, QuantizeStackAttributes);
DIPTYCH_HANDLERS(grouped_gemm, GroupedGemmAttributes);
DIPTYCH_HANDLERS(grouped_bias_grad, GroupedBiasGradAttributes);
