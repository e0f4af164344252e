// The XLA handlers of quantization.
#include <string>

#include "handler.h"

namespace diptych::xla_ffi {
namespace {

// Reads the source from the attributes and from the operands that come last:
//   norm: gamma, [beta], [mu: layernorm], rsigma       activation_grad: dy       permuted: row_id_map, row_source
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
    default:  // plain, or an unknown kind, which the core refuses
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

// x, [amax, columnwise_amax: mode given; amax: mode accumulate], [scale], [rng], [source]
//   -> [rowwise data, scale_inv], [columnwise data, scale_inv], [amax, columnwise_amax: not mode given], [column sum],
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
      *q = copy(static_cast<int32_t>(copy_format(a.spec, columnwise)), columnwise, data, t.out());
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
          return {Code::runtime, "quantize: XLA did not place the amax that accumulates in the memory of its operand"};
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

// data, scale_inv, [amax] -> out
Status run(Call& call, const DequantizeAttributes& d) {
  return call.each([&] {
    Buffers t(call);
    const TensorView data = t.in(), scale_inv = t.in();
    return dequantize(DequantizeArgs{copy(d.format, d.columnwise != 0, data, scale_inv, t.in(d.has_amax)), t.out()},
                      call.exec());
  });
}

}  // namespace diptych::xla_ffi

DIPTYCH_HANDLERS(amax, AmaxAttributes);
DIPTYCH_HANDLERS(quantize, QuantizeAttributes);
DIPTYCH_HANDLERS(dequantize, DequantizeAttributes);
