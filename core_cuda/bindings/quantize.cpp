// The Python module's quantization.
#include "families.h"
#include "program.h"

namespace diptych::bind {
namespace {

QuantizedView result(Call& call, py::handle data, py::handle scale, const QuantSpec& spec, bool columnwise,
                     const char* arg) {
  QuantizedView q;
  q.format = copy_format(spec, columnwise);
  q.columnwise = columnwise;
  q.data = call.out(data, arg);
  q.scale_inv = call.out(scale, arg);
  return q;
}

Source source_of(Call& call, MaybeSource tuple) {
  Source s;
  if (tuple.is_none()) return s;
  const Py_ssize_t fields = PyTuple_CheckExact(tuple.ptr()) ? PyTuple_GET_SIZE(tuple.ptr()) : 0;
  if (fields > 0) s.kind = static_cast<SourceKind>(scalar<int>(PyTuple_GET_ITEM(tuple.ptr(), 0), "source"));
  const bool permuted = s.kind == SourceKind::permuted;
  if (fields != (permuted ? 3 : 8))
    throw py::type_error(
        "argument 'source' must be None or a tuple (kind, norm or activation, zero_centered_gamma or gated, gamma, "
        "beta, mu, rsigma, dy) or, of permuted rows, (kind, row_id_map, row_source)");
  const auto t = py::reinterpret_borrow<py::tuple>(tuple);
  if (permuted) {
    s.row_id_map = call.in(t[1], "row_id_map");
    s.row_source = call.in(t[2], "row_source");
    return s;
  }
  const int variant = scalar<int>(t[1], "source");
  const bool flag = scalar<bool>(t[2], "source");
  if (s.kind == SourceKind::norm) {
    s.norm = static_cast<Norm>(variant);
    s.zero_centered_gamma = flag;
  } else {
    s.activation = static_cast<Activation>(variant);
    s.gated = flag;
  }
  s.gamma = call.in(t[3], "gamma");
  s.beta = call.in(t[4], "beta");
  s.mu = call.in(t[5], "mu");
  s.rsigma = call.in(t[6], "rsigma");
  s.dy = call.in(t[7], "dy");
  return s;
}

void py_amax(Operand x, Operand out, MaybeOperand columnwise_out, int flags, MaybeSource source) {
  Call call;
  AmaxArgs a;
  a.x = call.in(x, "x");
  a.out = call.out(out, "out");
  a.columnwise_out = call.out(columnwise_out, "columnwise_out");
  a.flags = flags;
  a.source = source_of(call, source);
  run(amax, a, call);
}

void require_mode(const char* op, int amax_mode) {
  if (amax_mode < 0 || amax_mode > static_cast<int>(AmaxMode::accumulate))
    throw py::value_error(std::string(op) + ": amax_mode must be 0 (compute), 1 (given) or 2 (accumulate), got " +
                          std::to_string(amax_mode));
}

void py_quantize(Operand x, int format, int flags, float eps, int amax_mode, MaybeOperand amax_buffer,
                 MaybeOperand columnwise_amax, MaybeOperand scale, MaybeOperand rng, MaybeOperand rowwise_data,
                 MaybeOperand rowwise_scale, MaybeOperand columnwise_data, MaybeOperand columnwise_scale,
                 MaybeSource source, MaybeOperand column_sum, MaybeOperand workspace, bool stack) {
  require_mode("quantize", amax_mode);
  Call call;
  QuantizeArgs a;
  a.amax_mode = static_cast<AmaxMode>(amax_mode);
  const auto amax_view = [&](py::handle buffer, const char* arg) {
    return a.amax_mode == AmaxMode::given ? call.in(buffer, arg) : call.out(buffer, arg);
  };
  a.x = call.in(x, "x");
  a.spec = {static_cast<FormatId>(format), flags, eps};
  a.amax = amax_view(amax_buffer, "amax");
  a.columnwise_amax = amax_view(columnwise_amax, "columnwise_amax");
  a.scale = call.in(scale, "scale");
  a.rng = call.in(rng, "rng");
  a.rowwise = result(call, rowwise_data, rowwise_scale, a.spec, false, "rowwise");
  a.columnwise = result(call, columnwise_data, columnwise_scale, a.spec, true, "columnwise");
  a.source = source_of(call, source);
  a.column_sum = call.out(column_sum, "column_sum");
  a.workspace = call.out(workspace, "workspace");
  stack ? run(quantize_stack, QuantizeStackArgs{a}, call) : run(quantize, a, call);
}

void py_quantize_many(Calls calls, int format, int flags, float eps, int amax_mode) {
  require_mode("quantize_many", amax_mode);
  Call call;
  QuantizeManyArgs many;
  for (const py::handle one : calls) {
    const py::tuple t = call_of(one, 9, "quantize_many");
    QuantizeArgs a;
    a.amax_mode = static_cast<AmaxMode>(amax_mode);
    const bool given = a.amax_mode == AmaxMode::given;
    a.x = call.in(t[0], "x");
    a.spec = {static_cast<FormatId>(format), flags, eps};
    a.amax = given ? call.in(t[1], "amax") : call.out(t[1], "amax");
    a.columnwise_amax = given ? call.in(t[2], "columnwise_amax") : call.out(t[2], "columnwise_amax");
    a.scale = call.in(t[3], "scale");
    a.rng = call.in(t[4], "rng");
    a.rowwise = result(call, t[5], t[6], a.spec, false, "rowwise");
    a.columnwise = result(call, t[7], t[8], a.spec, true, "columnwise");
    many.each.push_back(a);
  }
  run(quantize_many, many, call);
}

void py_dequantize(Operand data, Operand scale, MaybeOperand amax_buffer, int format, bool columnwise, Operand out) {
  Call call;
  DequantizeArgs a;
  a.q = operand(call, data, scale, amax_buffer, format, columnwise, "q");
  a.out = call.out(out, "out");
  run(dequantize, a, call);
}

}  // namespace

void add_quantize(py::module_& m) {
  m.def("amax", py_amax, py::arg("x"), py::arg("out"), py::arg("columnwise_out"), py::arg("flags"),
        py::arg("source") = py::none(), "source is as in quantize.");
  m.def(
      "quantize", py_quantize, py::arg("x"), py::arg("format"), py::arg("flags"), py::arg("eps"), py::arg("amax_mode"),
      py::arg("amax"), py::arg("columnwise_amax"), py::arg("scale"), py::arg("rng"), py::arg("rowwise_data"),
      py::arg("rowwise_scale_inv"), py::arg("columnwise_data"), py::arg("columnwise_scale_inv"),
      py::arg("source") = py::none(), py::arg("column_sum") = py::none(), py::arg("workspace") = py::none(),
      py::arg("stack") = false,
      "amax_mode: 0 computes amaxes from x, 1 reads them, 2 writes the larger of x's and the buffer's content.\n"
      "source: (kind, norm or activation, zero_centered_gamma or gated, gamma, beta, mu, rsigma, dy), or for permuted\n"
      "rows (kind, row_id_map, row_source). fused_table() lists the numbers.\n"
      "stack: x is a stack of G tensors, and every other tensor has a leading G too.");
  m.def("quantize_many", py_quantize_many, py::arg("calls"), py::arg("format"), py::arg("flags"), py::arg("eps"),
        py::arg("amax_mode"),
        "Quantizes many tensors of one dtype. A call: (x, amax, columnwise_amax, scale, rng, rowwise_data,\n"
        "rowwise_scale, columnwise_data, columnwise_scale), as for quantize.");
  m.def("dequantize", py_dequantize, py::arg("data"), py::arg("scale_inv"), py::arg("amax"), py::arg("format"),
        py::arg("columnwise"), py::arg("out"));
  m.def("column_sum_workspace_bytes", column_sum_workspace_bytes, py::arg("m"), py::arg("k"));
}

}  // namespace diptych::bind
