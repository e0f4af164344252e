// The handlers of quantization, of products and of what stands around them.
#include <string>

#include "handler.h"

namespace diptych::xla_ffi {
namespace {

// What is encoded instead of x, from the operands that come last:
//   norm: gamma, [beta], [mu: layernorm], rsigma       activation_grad: dy       permuted: row_id_map, source
template <typename Attributes>
Source source(const Attributes& d, Buffers& t) {
  Source s;
  s.kind = static_cast<SourceKind>(d.source);
  switch (s.kind) {
    case SourceKind::norm:
      s.norm = static_cast<Norm>(d.kind);
      s.zero_centered_gamma = d.option != 0;
      s.gamma = t.in();
      s.beta = t.in(d.has_beta);
      s.mu = t.in(s.norm == Norm::layernorm);
      s.rsigma = t.in();
      break;
    case SourceKind::activation:
    case SourceKind::activation_grad:
      s.activation = static_cast<Activation>(d.kind);
      s.gated = d.option != 0;
      s.dy = t.in(s.kind == SourceKind::activation_grad);
      break;
    case SourceKind::permuted:
      s.row_id_map = t.in();
      s.row_source = t.in();
      break;
    default:  // plain, or one that the core names
      break;
  }
  return s;
}

}  // namespace

// x, [source] -> amax, [columnwise amax]
Status run(Call& call, const AmaxAttributes& d) {
  return call.each([&] {
    Buffers t(call);
    AmaxArgs a;
    a.x = t.in();
    a.out = t.out();
    a.columnwise_out = t.out(d.columnwise);
    a.flags = d.flags;
    a.source = source(d, t);
    return amax(a, call.exec());
  });
}

// x, [amax, columnwise_amax: where given; amax: where accumulated], [scale], [rng], [source]
//   -> [rowwise data, scale_inv], [columnwise data, scale_inv], [amax, columnwise_amax: where not given], [column sum],
//      [workspace: CUDA, with a column sum]
Status run(Call& call, const QuantizeAttributes& d) {
  return call.each([&]() -> Status {
    Buffers t(call);
    QuantizeArgs a;
    a.x = t.in();
    a.spec = {static_cast<FormatId>(d.format), d.flags, d.eps};
    a.amax_mode = static_cast<AmaxMode>(d.amax_mode);
    for (QuantizedView* q : {&a.rowwise, &a.columnwise}) {
      const bool columnwise = q == &a.columnwise;
      if ((columnwise ? d.columnwise : d.rowwise) == 0) continue;
      const TensorView data = t.out();
      *q = copy(d.format, columnwise, data, t.out());
    }
    switch (a.amax_mode) {
      case AmaxMode::compute:
        a.amax = t.out(d.has_amax);
        a.columnwise_amax = t.out(d.has_columnwise_amax);
        break;
      case AmaxMode::given:
        a.amax = t.in(d.has_amax);
        a.columnwise_amax = t.in(d.has_columnwise_amax);
        break;
      case AmaxMode::accumulate:
        a.amax = t.out(d.has_amax);
        if (t.in(d.has_amax).data != a.amax.data)
          return {Code::runtime, "quantize: XLA gave an amax that accumulates other memory than its operand"};
        break;
      default:
        return {Code::value, "quantize: unknown amax mode " + std::to_string(d.amax_mode)};
    }
    a.scale = t.in(d.has_scale);
    a.rng = t.in(d.has_rng);
    a.source = source(d, t);
    a.column_sum = t.out(d.column_sum);
    a.workspace = t.out(d.column_sum);
    return quantize(a, call.exec());
  });
}

// history, scale, [reduced], [amax] -> new history, new scale
Status run(Call& call, const ScaleUpdateAttributes& d) {
  return call.each([&] {
    Buffers t(call);
    ScaleUpdateArgs a;
    a.history = t.in();
    a.scale = t.in();
    a.reduced = t.in(d.has_reduced);
    a.amax = t.in(d.has_amax);
    a.new_history = t.out();
    a.new_scale = t.out();
    a.fp8_max = d.fp8_max;
    a.margin = d.margin;
    a.most_recent = d.most_recent != 0;
    return scale_update(a, call.exec());
  });
}

// data, scale_inv, [amax] -> out
Status run(Call& call, const DequantizeAttributes& d) {
  return call.each([&] {
    Buffers t(call);
    const TensorView data = t.in(), scale_inv = t.in();
    return dequantize(DequantizeArgs{copy(d.format, d.columnwise != 0, data, scale_inv, t.in(d.has_amax)), t.out()},
                      call.exec());
  });
}

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
    g.fast_accum = d.fast_accum != 0;
    return gemm(g, call.exec());
  });
}

// dy -> out, [workspace: CUDA]
Status run(Call& call, const BiasGradAttributes&) {
  return call.each([&] { return bias_grad(BiasGradArgs{call.in(0), call.out(0), call.out(1)}, call.exec()); });
}

// x, [gamma], [beta] -> [mu: layernorm], rsigma, [y]
Status run(Call& call, const NormAttributes& d) {
  return call.each([&] {
    Buffers t(call);
    NormArgs a;
    a.norm = static_cast<Norm>(d.kind);
    a.eps = d.eps;
    a.zero_centered_gamma = d.zero_centered_gamma != 0;
    a.x = t.in();
    a.gamma = t.in(d.has_y);
    a.beta = t.in(d.has_beta);
    a.mu = t.out(a.norm == Norm::layernorm);
    a.rsigma = t.out();
    a.y = t.out(d.has_y);
    return norm(a, call.exec());
  });
}

// dy, x, gamma, [mu: layernorm], rsigma -> dx, dgamma, [dbeta], [workspace: CUDA]
Status run(Call& call, const NormGradAttributes& d) {
  return call.each([&] {
    Buffers t(call);
    NormGradArgs a;
    a.norm = static_cast<Norm>(d.kind);
    a.zero_centered_gamma = d.zero_centered_gamma != 0;
    a.dy = t.in();
    a.x = t.in();
    a.gamma = t.in();
    a.mu = t.in(a.norm == Norm::layernorm);
    a.rsigma = t.in();
    a.dx = t.out();
    a.dgamma = t.out();
    a.dbeta = t.out(d.has_dbeta);
    a.workspace = t.out();
    return norm_grad(a, call.exec());
  });
}

// x -> y
Status run(Call& call, const ActivationAttributes& d) {
  return call.each([&] {
    return activation({call.in(0), call.out(0), static_cast<Activation>(d.kind), d.gated != 0}, call.exec());
  });
}

// dy, x -> dx
Status run(Call& call, const ActivationGradAttributes& d) {
  return call.each([&] {
    return activation_grad({call.in(0), call.in(1), call.out(0), static_cast<Activation>(d.kind), d.gated != 0},
                           call.exec());
  });
}

}  // namespace diptych::xla_ffi

DIPTYCH_HANDLERS(amax, AmaxAttributes);
DIPTYCH_HANDLERS(quantize, QuantizeAttributes);
DIPTYCH_HANDLERS(scale_update, ScaleUpdateAttributes);
DIPTYCH_HANDLERS(dequantize, DequantizeAttributes);
DIPTYCH_HANDLERS(gemm, GemmAttributes);
DIPTYCH_HANDLERS(bias_grad, BiasGradAttributes);
DIPTYCH_HANDLERS(norm, NormAttributes);
DIPTYCH_HANDLERS(norm_grad, NormGradAttributes);
DIPTYCH_HANDLERS(activation, ActivationAttributes);
DIPTYCH_HANDLERS(activation_grad, ActivationGradAttributes);

// What this library was compiled with; read before anything is registered.
extern "C" const char* diptych_jax_headers() { return DIPTYCH_JAXLIB_VERSION; }
extern "C" int diptych_jax_ffi_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }
extern "C" int diptych_jax_attributes_version() { return diptych::xla_ffi::kAttributesVersion; }
