// The Python module's products of groups.
#include "diptych/grouped.h"

#include "families.h"
#include "program.h"

namespace diptych::bind {

namespace {

void py_grouped_gemm(Operand a_data, Operand a_scale, MaybeOperand a_amax, int a_format, bool a_columnwise,
                     Operand b_data, Operand b_scale, MaybeOperand b_amax, int b_format, bool b_columnwise,
                     Operand offsets, Operand d, MaybeOperand c, MaybeOperand bias, MaybeOperand workspace, int kind,
                     int align, bool rotated, float alpha, float beta DIPTYCH_GEMM_OPTIONS(DIPTYCH_PARAMETER, bool)) {
  Call call;
  GroupedGemmArgs g;
  g.a = operand(call, a_data, a_scale, a_amax, a_format, a_columnwise, "a");
  g.b = operand(call, b_data, b_scale, b_amax, b_format, b_columnwise, "b");
  g.offsets = call.in(offsets, "offsets");
  g.d = call.out(d, "d");
  g.c = call.in(c, "c");
  g.bias = call.in(bias, "bias");
  g.workspace = call.out(workspace, "workspace");
  g.kind = static_cast<GroupKind>(kind);
  g.align = align;
  g.rotated = rotated;
  g.alpha = alpha;
  g.beta = beta;
  g.options = {DIPTYCH_GEMM_OPTIONS(DIPTYCH_VALUE, bool)};
  run(grouped_gemm, g, call);
}

int64_t py_grouped_gemm_workspace_bytes(int a_format, int b_format, int kind, int64_t m, int64_t n, int64_t k,
                                        int64_t groups) {
  return grouped_gemm_workspace_bytes(known(a_format), known(b_format), static_cast<GroupKind>(kind), m, n, k, groups);
}

void py_grouped_bias_grad(Operand dy, Operand offsets, Operand out, MaybeOperand workspace) {
  Call call;
  GroupedBiasGradArgs a;
  a.dy = call.in(dy, "dy");
  a.offsets = call.in(offsets, "offsets");
  a.out = call.out(out, "out");
  a.workspace = call.out(workspace, "workspace");
  run(grouped_bias_grad, a, call);
}

Numbers group_kinds() {
  Numbers d;
  d["rows"] = static_cast<int>(GroupKind::rows);
  d["depth"] = static_cast<int>(GroupKind::depth);
  return d;
}

}  // namespace

void add_grouped(py::module_& m) {
  m.def("grouped_gemm", py_grouped_gemm, py::arg("a_data"), py::arg("a_scale_inv"), py::arg("a_amax"),
        py::arg("a_format"), py::arg("a_columnwise"), py::arg("b_data"), py::arg("b_scale_inv"), py::arg("b_amax"),
        py::arg("b_format"), py::arg("b_columnwise"), py::arg("offsets"), py::arg("d"), py::arg("c"), py::arg("bias"),
        py::arg("workspace"), py::arg("kind"), py::arg("align"), py::arg("rotated"), py::arg("alpha"),
        py::arg("beta") DIPTYCH_GEMM_OPTIONS(DIPTYCH_ARG, bool), "kind is a number from group_kinds().");
  m.def("grouped_gemm_workspace_bytes", py_grouped_gemm_workspace_bytes, py::arg("a_format"), py::arg("b_format"),
        py::arg("kind"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("groups"),
        "kind is a number from group_kinds().");
  m.def("grouped_bias_grad", py_grouped_bias_grad, py::arg("dy"), py::arg("offsets"), py::arg("out"),
        py::arg("workspace"));
  m.def("grouped_bias_grad_workspace_bytes", grouped_bias_grad_workspace_bytes, py::arg("rows"), py::arg("cols"),
        py::arg("groups"));
  m.def("group_kinds", group_kinds);
}

}  // namespace diptych::bind
