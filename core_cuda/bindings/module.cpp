// The Python module: every op over borrowed tensors, and the tables behind them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "diptych/warn.h"
#include "dlpack_abi.h"
#include "operand.h"
#include "src/registry.h"
#ifdef DIPTYCH_WITH_CUDA
#include "cuda/kernels.h"
#endif

namespace diptych::bind {
namespace {

void raise(const Status& s) {
  switch (s.code()) {
    case Code::ok:
      return;
    case Code::value:
      throw py::value_error(s.message());
    case Code::type:
      throw py::type_error(s.message());
    case Code::unsupported:
      PyErr_SetString(PyExc_NotImplementedError, s.message().c_str());
      throw py::error_already_set();
    case Code::runtime:
      throw std::runtime_error(s.message());
  }
}

void warn(const std::string& message) {
  const py::object category = py::module_::import("diptych.common.errors").attr("EmulationWarning");
  if (PyErr_WarnEx(category.ptr(), message.c_str(), 1) != 0) throw py::error_already_set();
}

template <typename Args>
void run(Status (*op)(const Args&, const Execution&), const Args& args, Call& call) {
  const Execution exec = call.execution();
  Status status;
  const WarningCollector warnings;
  {
    py::gil_scoped_release release;
    status = op(args, exec);
  }
  for (const std::string& message : warnings.messages()) warn(message);
  raise(status);
}

QuantizedView copy(Call& call, py::handle data, py::handle scale, int format, bool columnwise, const char* arg,
                   bool out) {
  QuantizedView q;
  q.format = static_cast<FormatId>(format);
  q.columnwise = columnwise;
  q.data = out ? call.out(data, arg) : call.in(data, arg);
  q.scale_inv = out ? call.out(scale, arg) : call.in(scale, arg);
  return q;
}

void py_amax(py::handle x, py::handle out) {
  Call call;
  AmaxArgs a;
  a.x = call.in(x, "x");
  a.out = call.out(out, "out");
  run(amax, a, call);
}

void py_quantize(py::handle x, int format, bool pow2, float eps, py::handle amax_buffer, bool amax_ready,
                 py::handle rowwise_data, py::handle rowwise_scale, py::handle columnwise_data,
                 py::handle columnwise_scale) {
  Call call;
  QuantizeArgs a;
  a.x = call.in(x, "x");
  a.spec = {static_cast<FormatId>(format), pow2, eps};
  a.amax = amax_ready ? call.in(amax_buffer, "amax") : call.out(amax_buffer, "amax");
  a.amax_ready = amax_ready;
  a.rowwise = copy(call, rowwise_data, rowwise_scale, format, false, "rowwise", true);
  a.columnwise = copy(call, columnwise_data, columnwise_scale, format, true, "columnwise", true);
  run(quantize, a, call);
}

void py_dequantize(py::handle data, py::handle scale, int format, bool columnwise, py::handle out) {
  Call call;
  DequantizeArgs a;
  a.q = copy(call, data, scale, format, columnwise, "q", false);
  a.out = call.out(out, "out");
  run(dequantize, a, call);
}

void py_gemm(py::handle a_data, py::handle a_scale, int a_format, bool a_columnwise, py::handle b_data,
             py::handle b_scale, int b_format, bool b_columnwise, py::handle d, py::handle c, py::handle bias,
             py::handle workspace, float alpha, float beta, bool fast_accum) {
  Call call;
  GemmArgs g;
  g.a = copy(call, a_data, a_scale, a_format, a_columnwise, "a", false);
  g.b = copy(call, b_data, b_scale, b_format, b_columnwise, "b", false);
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

py::list format_table() {
  py::list rows;
  for (const FormatRow& f : kFormats) {
    py::dict d;
    d["name"] = f.name;
    d["element"] = name(f.element);
    d["scale"] = name(f.scale);
    d["block_rows"] = f.block_rows;
    d["block_cols"] = f.block_cols;
    d["rule"] = f.rule == ScaleRule::divide ? "divide" : "e8m0_ceil";
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
  auto operand = [&](int format, bool columnwise, int64_t outer) {
    const FormatRow& f = row(static_cast<FormatId>(format));
    const bool k_first = columnwise && f.columnwise == ColumnwiseLayout::row_major;
    QuantizedView q;
    q.format = static_cast<FormatId>(format);
    q.columnwise = columnwise;
    q.data = k_first ? matrix(f.element, k, outer) : matrix(f.element, outer, k);
    q.scale_inv = matrix(f.scale, 1, 1);
    return q;
  };
  GemmArgs g;
  g.a = operand(a_format, a_columnwise, m);
  g.b = operand(b_format, b_columnwise, n);
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
  m.doc() = "diptych's kernels over borrowed tensors. Outputs are allocated by the caller.";
  m.def("amax", py_amax, py::arg("x"), py::arg("out"));
  m.def("quantize", py_quantize, py::arg("x"), py::arg("format"), py::arg("pow2"), py::arg("eps"), py::arg("amax"),
        py::arg("amax_ready"), py::arg("rowwise_data"), py::arg("rowwise_scale_inv"), py::arg("columnwise_data"),
        py::arg("columnwise_scale_inv"));
  m.def("dequantize", py_dequantize, py::arg("data"), py::arg("scale_inv"), py::arg("format"), py::arg("columnwise"),
        py::arg("out"));
  m.def("gemm", py_gemm, py::arg("a_data"), py::arg("a_scale_inv"), py::arg("a_format"), py::arg("a_columnwise"),
        py::arg("b_data"), py::arg("b_scale_inv"), py::arg("b_format"), py::arg("b_columnwise"), py::arg("d"),
        py::arg("c"), py::arg("bias"), py::arg("workspace"), py::arg("alpha"), py::arg("beta"), py::arg("fast_accum"));
  m.def("bias_grad", py_bias_grad, py::arg("dy"), py::arg("out"), py::arg("workspace"));
  m.def("gemm_workspace_bytes", gemm_workspace_bytes, py::arg("m"), py::arg("n"), py::arg("k"), py::arg("epilogue"));
  m.def("bias_grad_workspace_bytes", bias_grad_workspace_bytes, py::arg("m"), py::arg("n"));
  m.def("format_table", format_table);
  m.def("dtype_table", dtype_table);
  m.def("kernel_table", kernel_table);
  m.def("reset_calls", reset_calls);
  m.def("gemm_row", gemm_row, py::arg("a_format"), py::arg("a_columnwise"), py::arg("b_format"),
        py::arg("b_columnwise"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("out_dtype"), py::arg("backend"),
        py::arg("device_index"));
  m.def(
      "set_num_threads",
      [](int n) {
        if (n < 1) throw py::value_error("set_num_threads: n must be at least 1, got " + std::to_string(n));
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
