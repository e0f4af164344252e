// The Python module: every op over borrowed tensors, and the tables behind them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "diptych/stack.h"
#include "grouped.h"
#include "interrupt.h"
#include "moe.h"
#include "program.h"
#include "src/registry.h"
#ifdef DIPTYCH_WITH_CUDA
#include "cuda/kernels.h"
#endif

namespace diptych::bind {
namespace {

QuantizedView result(Call& call, py::handle data, py::handle scale, int format, bool columnwise, const char* arg) {
  QuantizedView q;
  q.format = static_cast<FormatId>(format);
  q.columnwise = columnwise;
  q.data = call.out(data, arg);
  q.scale_inv = call.out(scale, arg);
  return q;
}

// None, (kind, norm or activation, zero_centered_gamma or gated, gamma, beta, mu, rsigma, dy), or, of permuted rows,
// (kind, row_id_map, source)
Source source_of(Call& call, py::handle tuple) {
  Source s;
  if (tuple.is_none()) return s;
  const Py_ssize_t fields = PyTuple_CheckExact(tuple.ptr()) ? PyTuple_GET_SIZE(tuple.ptr()) : 0;
  if (fields > 0) s.kind = static_cast<SourceKind>(scalar<int>(PyTuple_GET_ITEM(tuple.ptr(), 0), "source"));
  const bool permuted = s.kind == SourceKind::permuted;
  if (fields != (permuted ? 3 : 8))
    throw py::type_error(
        "argument 'source' must be None or a tuple (kind, norm or activation, zero_centered_gamma or gated, gamma, "
        "beta, mu, rsigma, dy) or, of permuted rows, (kind, row_id_map, source)");
  const auto t = py::reinterpret_borrow<py::tuple>(tuple);
  if (permuted) {
    s.row_id_map = call.in(t[1], "row_id_map");
    s.row_source = call.in(t[2], "source");
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

void py_amax(py::handle x, py::handle out, py::handle columnwise_out, int flags, py::handle source) {
  Call call;
  AmaxArgs a;
  a.x = call.in(x, "x");
  a.out = call.out(out, "out");
  a.columnwise_out = call.out(columnwise_out, "columnwise_out");
  a.flags = flags;
  a.source = source_of(call, source);
  run(amax, a, call);
}

void py_quantize(py::handle x, int format, int flags, float eps, int amax_mode, py::handle amax_buffer,
                 py::handle columnwise_amax, py::handle scale, py::handle rng, py::handle rowwise_data,
                 py::handle rowwise_scale, py::handle columnwise_data, py::handle columnwise_scale, py::handle source,
                 py::handle column_sum, py::handle workspace, bool stack) {
  if (amax_mode < 0 || amax_mode > static_cast<int>(AmaxMode::accumulate))
    throw py::value_error("quantize: amax_mode must be 0 (compute), 1 (given) or 2 (accumulate), got " +
                          std::to_string(amax_mode));
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
  a.rowwise = result(call, rowwise_data, rowwise_scale, format, false, "rowwise");
  a.columnwise = result(call, columnwise_data, columnwise_scale, format, true, "columnwise");
  a.source = source_of(call, source);
  a.column_sum = call.out(column_sum, "column_sum");
  a.workspace = call.out(workspace, "workspace");
  run(stack ? quantize_stack : quantize, a, call);
}

void py_log_amax(py::handle amax_buffer, py::handle log, py::handle written) {
  Call call;
  run(log_amax, LogAmaxArgs{call.in(amax_buffer, "amax"), {call.out(log, "log"), call.out(written, "written")}}, call);
}

void py_scale_update(py::handle history, py::handle scale, py::handle reduced, py::handle amax_buffer,
                     py::handle new_history, py::handle new_scale, float fp8_max, int margin, bool most_recent,
                     py::handle seen, py::handle step, py::handle pending, py::handle log, py::handle written,
                     py::handle taken, py::handle scale_out) {
  Call call;
  ScaleUpdateArgs a;
  a.history = call.in(history, "history");
  a.scale = call.in(scale, "scale");
  a.reduced = call.in(reduced, "reduced");
  a.amax = call.in(amax_buffer, "amax");
  a.new_history = call.out(new_history, "new_history");
  a.new_scale = call.out(new_scale, "new_scale");
  a.seen = call.in(seen, "seen");
  a.step = call.in(step, "step");
  a.pending = call.out(pending, "pending");
  a.log = {call.in(log, "log"), call.in(written, "written")};
  a.taken = call.out(taken, "taken");
  a.scale_out = call.out(scale_out, "scale_out");
  a.fp8_max = fp8_max;
  a.margin = margin;
  a.most_recent = most_recent;
  run(scale_update, a, call);
}

void py_dequantize(py::handle data, py::handle scale, py::handle amax_buffer, int format, bool columnwise,
                   py::handle out) {
  Call call;
  DequantizeArgs a;
  a.q = operand(call, data, scale, amax_buffer, format, columnwise, "q");
  a.out = call.out(out, "out");
  run(dequantize, a, call);
}

void py_gemm(py::handle a_data, py::handle a_scale, py::handle a_amax, int a_format, bool a_columnwise,
             py::handle b_data, py::handle b_scale, py::handle b_amax, int b_format, bool b_columnwise, py::handle d,
             py::handle c, py::handle bias, py::handle workspace, float alpha, float beta, bool fast_accum) {
  Call call;
  GemmArgs g;
  g.a = operand(call, a_data, a_scale, a_amax, a_format, a_columnwise, "a");
  g.b = operand(call, b_data, b_scale, b_amax, b_format, b_columnwise, "b");
  g.d = call.out(d, "d");
  g.c = call.in(c, "c");
  g.bias = call.in(bias, "bias");
  g.workspace = call.out(workspace, "workspace");
  g.alpha = alpha;
  g.beta = beta;
  g.fast_accum = fast_accum;
  run(gemm, g, call);
}

void py_bias_grad(py::handle dy, py::handle out, py::handle workspace) {
  Call call;
  BiasGradArgs a;
  a.dy = call.in(dy, "dy");
  a.out = call.out(out, "out");
  a.workspace = call.out(workspace, "workspace");
  run(bias_grad, a, call);
}

void py_norm(py::handle x, py::handle gamma, py::handle beta, py::handle mu, py::handle rsigma, py::handle y,
             int norm_kind, float eps, bool zero_centered_gamma) {
  Call call;
  NormArgs a;
  a.x = call.in(x, "x");
  a.gamma = call.in(gamma, "gamma");
  a.beta = call.in(beta, "beta");
  a.mu = call.out(mu, "mu");
  a.rsigma = call.out(rsigma, "rsigma");
  a.y = call.out(y, "y");
  a.norm = static_cast<Norm>(norm_kind);
  a.eps = eps;
  a.zero_centered_gamma = zero_centered_gamma;
  run(norm, a, call);
}

void py_norm_grad(py::handle dy, py::handle x, py::handle gamma, py::handle mu, py::handle rsigma, py::handle dx,
                  py::handle dgamma, py::handle dbeta, py::handle workspace, int norm_kind, bool zero_centered_gamma) {
  Call call;
  NormGradArgs a;
  a.dy = call.in(dy, "dy");
  a.x = call.in(x, "x");
  a.gamma = call.in(gamma, "gamma");
  a.mu = call.in(mu, "mu");
  a.rsigma = call.in(rsigma, "rsigma");
  a.dx = call.out(dx, "dx");
  a.dgamma = call.out(dgamma, "dgamma");
  a.dbeta = call.out(dbeta, "dbeta");
  a.workspace = call.out(workspace, "workspace");
  a.norm = static_cast<Norm>(norm_kind);
  a.zero_centered_gamma = zero_centered_gamma;
  run(norm_grad, a, call);
}

void py_activation(py::handle x, py::handle y, int kind, bool gated) {
  Call call;
  ActivationArgs a;
  a.x = call.in(x, "x");
  a.y = call.out(y, "y");
  a.kind = static_cast<Activation>(kind);
  a.gated = gated;
  run(activation, a, call);
}

void py_activation_grad(py::handle dy, py::handle x, py::handle dx, int kind, bool gated) {
  Call call;
  ActivationGradArgs a;
  a.dy = call.in(dy, "dy");
  a.x = call.in(x, "x");
  a.dx = call.out(dx, "dx");
  a.kind = static_cast<Activation>(kind);
  a.gated = gated;
  run(activation_grad, a, call);
}

// The numbers of the enumerations that ops take, by name
py::dict fused_table() {
  const auto numbered = [](std::initializer_list<const char*> names) {
    py::dict d;
    int i = 0;
    for (const char* name : names) d[name] = i++;
    return d;
  };
  py::dict d;
  d["norm"] = numbered({"layernorm", "rmsnorm"});
  d["activation"] = numbered({"gelu", "relu", "silu", "srelu", "qgelu"});
  d["source"] = numbered({"plain", "norm", "activation", "activation_grad", "permuted"});
  return d;
}

py::list format_table() {
  constexpr const char* rules[] = {"divide", "e8m0_ceil", "two_level"};
  py::list rows;
  for (const FormatRow& f : kFormats) {
    py::dict d;
    d["name"] = f.name;
    d["element"] = name(f.element);
    d["scale"] = name(f.scale);
    d["block_rows"] = f.block_rows;
    d["block_cols"] = f.block_cols;
    d["rule"] = rules[static_cast<int>(f.rule)];
    d["scale_layout"] = "row_major";
    d["columnwise"] = f.columnwise == ColumnwiseLayout::transposed ? "transposed" : "row_major";
    d["tolerance"] = f.tolerance;
    rows.append(d);
  }
  return rows;
}

py::dict dtype_table() {
  py::dict d;
  for (const DTypeRow& r : kDTypes) d[r.name] = static_cast<int>(r.id);
  return d;
}

py::dict flag_table() {
  py::dict d;
  d["pow2"] = static_cast<int>(kPow2);
  d["square"] = static_cast<int>(kSquare);
  d["row_amax"] = static_cast<int>(kRowAmax);
  d["rht"] = static_cast<int>(kRht);
  d["rht_signs"] = static_cast<int>(kRhtSigns);
  d["stochastic"] = static_cast<int>(kStochastic);
  return d;
}

py::list kernel_table() {
  py::list rows;
  for (const RowInfo& r : registry_table()) {
    py::dict d;
    d["op"] = r.op;
    d["backend"] = r.backend;
    d["min_arch"] = r.min_arch;
    d["formats"] = r.formats;
    d["level"] = r.level;
    d["kernel"] = r.kernel;
    d["note"] = r.note;
    d["calls"] = r.calls;
    rows.append(d);
  }
  return rows;
}

// The row of kernel_table() that a product of these copies would run on, or -1. Reads no memory.
int gemm_row(int a_format, bool a_columnwise, int b_format, bool b_columnwise, int64_t m, int64_t n, int64_t k,
             const std::string& out_dtype, const std::string& backend, int device_index) {
  if (!valid(static_cast<FormatId>(a_format)) || !valid(static_cast<FormatId>(b_format)))
    throw py::value_error("gemm_row: unknown format id");
  if (backend != "cpu" && backend != "cuda") throw py::value_error("gemm_row: backend must be cpu or cuda");
  void* aligned = reinterpret_cast<void*>(uintptr_t{256});
  const Device device{backend == "cpu" ? Backend::cpu : Backend::cuda, device_index};
  auto matrix = [&](DType dtype, int64_t rows, int64_t cols) {
    TensorView v;
    v.data = aligned;
    v.dtype = dtype;
    v.rank = 2;
    v.shape[0] = rows;
    v.shape[1] = cols;
    v.device = device;
    return v;
  };
  auto unread = [&](int format, bool columnwise, int64_t outer) {
    const FormatRow& f = row(static_cast<FormatId>(format));
    const bool k_first = columnwise && f.columnwise == ColumnwiseLayout::row_major;
    QuantizedView q;
    q.format = static_cast<FormatId>(format);
    q.columnwise = columnwise;
    q.data = k_first ? matrix(f.data(), k, outer / f.pack()) : matrix(f.data(), outer, k / f.pack());
    q.scale_inv = matrix(f.scale, 1, 1);
    if (f.rule == ScaleRule::two_level) q.amax = matrix(DType::f32, 1, 1);
    return q;
  };
  GemmArgs g;
  g.a = unread(a_format, a_columnwise, m);
  g.b = unread(b_format, b_columnwise, n);
  for (const DTypeRow& r : kDTypes)
    if (out_dtype == r.name) g.d = matrix(r.id, m, n);
  if (!g.d.given()) throw py::value_error("gemm_row: unknown dtype " + out_dtype);
  return find_row(Op::gemm, only(g.a.format) | only(g.b.format), &g, device);
}

py::dict build_info() {
  py::dict d;
  d["cuda"] = cuda_built();
  d["compiler"] = __VERSION__;
  d["isa"] = cpu::isa();
  d["cuda_toolkit"] = DIPTYCH_CUDA_VERSION;
  d["cuda_archs"] = DIPTYCH_CUDA_ARCHS;
  return d;
}

py::dict cuda_info() {  // touches the driver, unlike importing
  py::dict d;
  py::list archs;
  std::string cublaslt;
#ifdef DIPTYCH_WITH_CUDA
  for (int i = 0; i < cuda::device_count(); ++i) archs.append(cuda::arch(i));
  cublaslt = cuda::cublaslt_version();
#endif
  d["archs"] = archs;
  d["cublaslt"] = cublaslt;
  return d;
}

py::dict dlpack_layout() {  // compared by a test with the header that torch ships
  py::dict d;
  d["sizeof_tensor"] = sizeof(dl::Tensor);
  d["sizeof_api"] = sizeof(dl::ExchangeApi);
  d["tensor_from_object"] = offsetof(dl::ExchangeApi, tensor_from_object);
  d["current_work_stream"] = offsetof(dl::ExchangeApi, current_work_stream);
  return d;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  find_main_thread();
  m.doc() = "diptych's kernels over borrowed tensors. Outputs are allocated by the caller.";
  m.def("amax", py_amax, py::arg("x"), py::arg("out"), py::arg("columnwise_out"), py::arg("flags"),
        py::arg("source") = py::none());
  m.def("quantize", py_quantize, py::arg("x"), py::arg("format"), py::arg("flags"), py::arg("eps"),
        py::arg("amax_mode"), py::arg("amax"), py::arg("columnwise_amax"), py::arg("scale"), py::arg("rng"),
        py::arg("rowwise_data"), py::arg("rowwise_scale_inv"), py::arg("columnwise_data"),
        py::arg("columnwise_scale_inv"), py::arg("source") = py::none(), py::arg("column_sum") = py::none(),
        py::arg("workspace") = py::none(), py::arg("stack") = false);
  m.def("scale_update", py_scale_update, py::arg("history"), py::arg("scale"), py::arg("reduced"), py::arg("amax"),
        py::arg("new_history"), py::arg("new_scale"), py::arg("fp8_max"), py::arg("margin"), py::arg("most_recent"),
        py::arg("seen") = py::none(), py::arg("step") = py::none(), py::arg("pending") = py::none(),
        py::arg("log") = py::none(), py::arg("written") = py::none(), py::arg("taken") = py::none(),
        py::arg("scale_out") = py::none());
  m.def("log_amax", py_log_amax, py::arg("amax"), py::arg("log"), py::arg("written"));
  m.def("dequantize", py_dequantize, py::arg("data"), py::arg("scale_inv"), py::arg("amax"), py::arg("format"),
        py::arg("columnwise"), py::arg("out"));
  m.def("gemm", py_gemm, py::arg("a_data"), py::arg("a_scale_inv"), py::arg("a_amax"), py::arg("a_format"),
        py::arg("a_columnwise"), py::arg("b_data"), py::arg("b_scale_inv"), py::arg("b_amax"), py::arg("b_format"),
        py::arg("b_columnwise"), py::arg("d"), py::arg("c"), py::arg("bias"), py::arg("workspace"), py::arg("alpha"),
        py::arg("beta"), py::arg("fast_accum"));
  m.def("bias_grad", py_bias_grad, py::arg("dy"), py::arg("out"), py::arg("workspace"));
  m.def("gemm_workspace_bytes", gemm_workspace_bytes, py::arg("m"), py::arg("n"), py::arg("k"), py::arg("epilogue"));
  m.def("bias_grad_workspace_bytes", bias_grad_workspace_bytes, py::arg("m"), py::arg("n"));
  m.def("norm", py_norm, py::arg("x"), py::arg("gamma"), py::arg("beta"), py::arg("mu"), py::arg("rsigma"),
        py::arg("y"), py::arg("norm"), py::arg("eps"), py::arg("zero_centered_gamma"));
  m.def("norm_grad", py_norm_grad, py::arg("dy"), py::arg("x"), py::arg("gamma"), py::arg("mu"), py::arg("rsigma"),
        py::arg("dx"), py::arg("dgamma"), py::arg("dbeta"), py::arg("workspace"), py::arg("norm"),
        py::arg("zero_centered_gamma"));
  m.def("activation", py_activation, py::arg("x"), py::arg("y"), py::arg("kind"), py::arg("gated"));
  m.def("activation_grad", py_activation_grad, py::arg("dy"), py::arg("x"), py::arg("dx"), py::arg("kind"),
        py::arg("gated"));
  m.def("norm_grad_workspace_bytes", norm_grad_workspace_bytes, py::arg("m"), py::arg("k"));
  m.def("column_sum_workspace_bytes", column_sum_workspace_bytes, py::arg("m"), py::arg("k"));
  add_moe(m);
  add_grouped(m);
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init<>())
      .def("start", &Program::start)
      .def("stop", &Program::stop)
      .def("seal", &Program::seal, py::arg("inputs"), py::arg("outputs"), py::arg("scratch"), py::arg("views"),
           py::arg("makers"), py::arg("make_workspace"))
      .def("run", &Program::run, py::arg("inputs"));
  m.def("fused_table", fused_table);
  m.def("format_table", format_table);
  m.def("dtype_table", dtype_table);
  m.def("flag_table", flag_table);
  m.def("kernel_table", kernel_table);
  m.def("reset_calls", reset_calls);
  m.def("gemm_row", gemm_row, py::arg("a_format"), py::arg("a_columnwise"), py::arg("b_format"),
        py::arg("b_columnwise"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("out_dtype"), py::arg("backend"),
        py::arg("device_index"));
  m.def(
      "set_num_threads",
      [](int n) {
        if (n < 1 || n > cpu::kMaxThreads)
          throw py::value_error("set_num_threads: n must be at least 1 and at most " +
                                std::to_string(cpu::kMaxThreads) + ", got " + std::to_string(n));
        cpu::set_num_threads(n);
      },
      py::arg("n"));
  m.def("get_num_threads", cpu::num_threads);
  m.def(
      "set_isa",
      [](const std::string& name) {
        if (!cpu::set_isa(name.c_str()))
          throw py::value_error("set_isa: this machine has no '" + name + "'; choose avx512, avx2 or generic");
      },
      py::arg("name"));
  m.def("build_info", build_info);
  m.def("cuda_info", cuda_info);
  m.def(
      "set_cublaslt_path",
      [](const std::string& path) {
#ifdef DIPTYCH_WITH_CUDA
        cuda::set_cublaslt_path(path.c_str());
#else
        throw py::value_error("set_cublaslt_path: this build has no CUDA backend, so " + path + " would not be opened");
#endif
      },
      py::arg("path"));
  m.def("dlpack_layout", dlpack_layout);
}

}  // namespace diptych::bind
