// The tables behind the ops: formats, dtypes, options and kernels.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "families.h"
#include "operand.h"
#include "src/registry.h"
#include "types.h"

namespace diptych::bind {

template <>
struct Record<FormatRow> {
  static constexpr auto name = py::detail::const_name("FormatTableRow");
  template <typename F>
  static void entries(const FormatRow& r, F&& f) {
    constexpr const char* rules[] = {"divide", "e8m0_ceil", "two_level"};
    f("name", r.name), f("element", diptych::name(r.element)), f("scale", diptych::name(r.scale));
    f("block_rows", r.block_rows), f("block_cols", r.block_cols), f("rule", rules[static_cast<int>(r.rule)]);
    f("columnwise", r.columnwise == ColumnwiseLayout::transposed ? "transposed" : "row_major");
    f("tolerance", r.tolerance);
  }
};

template <>
struct Record<RowInfo> {
  static constexpr auto name = py::detail::const_name("KernelTableRow");
  template <typename F>
  static void entries(const RowInfo& r, F&& f) {
    f("op", r.op), f("backend", r.backend), f("min_arch", r.min_arch), f("max_arch", r.max_arch),
        f("formats", r.formats), f("level", r.level);
    f("kernel", r.kernel), f("note", r.note), f("conditional", r.conditional), f("calls", r.calls);
  }
};

namespace {

// The numbers of the enumerators that ops take, by name.
py::typing::Dict<py::str, Numbers> fused_table() {
  const auto numbered = [](std::initializer_list<const char*> names) {
    Numbers d;
    int i = 0;
    for (const char* name : names) d[name] = i++;
    return d;
  };
  py::typing::Dict<py::str, Numbers> d;
  d["norm"] = numbered({"layernorm", "rmsnorm"});
  d["activation"] = numbered({"gelu", "relu", "silu", "srelu", "qgelu"});
  d["source"] = numbered({"plain", "norm", "activation", "activation_grad", "permuted"});
  return d;
}

std::vector<FormatRow> format_table() { return {std::begin(kFormats), std::end(kFormats)}; }

Numbers dtype_table() {
  Numbers d;
  for (const DTypeRow& r : kDTypes) d[r.name] = static_cast<int>(r.id);
  return d;
}

Numbers flag_table() {
  Numbers d;
  d["pow2"] = static_cast<int>(kPow2);
  d["square"] = static_cast<int>(kSquare);
  d["row_amax"] = static_cast<int>(kRowAmax);
  d["rht"] = static_cast<int>(kRht);
  d["rht_signs"] = static_cast<int>(kRhtSigns);
  d["stochastic"] = static_cast<int>(kStochastic);
  d["from_rows"] = static_cast<int>(kFromRows);
  return d;
}

int gemm_row(int a_format, bool a_columnwise, int b_format, bool b_columnwise, int64_t m, int64_t n, int64_t k,
             const std::string& out_dtype, const std::string& backend,
             int device_index DIPTYCH_GEMM_OPTIONS(DIPTYCH_PARAMETER, bool)) {
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
  g.options = {DIPTYCH_GEMM_OPTIONS(DIPTYCH_VALUE, bool)};
  return find_row(Op::gemm, only(g.a.format) | only(g.b.format), &g, device);
}

void switch_kernel_named(const std::string& kernel, bool on) {
  if (!switch_kernel(kernel, on)) throw py::value_error("switch_kernel: no kernel is named " + kernel);
}

}  // namespace

#define DIPTYCH_OFF(type, name) \
  , py::arg(#name) = type {}

void add_tables(py::module_& m) {
  add_record<FormatRow>(m);
  add_record<RowInfo>(m);
  m.def("fused_table", fused_table);
  m.def("format_table", format_table);
  m.def("dtype_table", dtype_table);
  m.def("flag_table", flag_table);
  m.def("kernel_table", registry_table);
  m.def("reset_calls", reset_calls);
  m.def(
      "switch_kernel", switch_kernel_named, py::arg("kernel"), py::arg("on"),
      "Lets no call of this process run a kernel, or lets calls run it again. Raises ValueError for an unknown name.");
  m.def("gemm_row", gemm_row, py::arg("a_format"), py::arg("a_columnwise"), py::arg("b_format"),
        py::arg("b_columnwise"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("out_dtype"), py::arg("backend"),
        py::arg("device_index") DIPTYCH_GEMM_OPTIONS(DIPTYCH_OFF, bool),
        "Returns the index in kernel_table() of the row that would run this product, or -1. Reads no tensor.");
}

}  // namespace diptych::bind
