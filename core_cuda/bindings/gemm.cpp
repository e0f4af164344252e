// The Python module's products and bias gradient.
#include "families.h"
#include "program.h"

namespace diptych::bind {
namespace {

void py_gemm(Operand a_data, Operand a_scale, MaybeOperand a_amax, int a_format, bool a_columnwise, Operand b_data,
             Operand b_scale, MaybeOperand b_amax, int b_format, bool b_columnwise, Operand d, MaybeOperand c,
             MaybeOperand bias, MaybeOperand workspace, float alpha,
             float beta DIPTYCH_GEMM_OPTIONS(DIPTYCH_PARAMETER, bool)) {
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
  g.options = {DIPTYCH_GEMM_OPTIONS(DIPTYCH_VALUE, bool)};
  run(gemm, g, call);
}

int64_t py_gemm_workspace_bytes(int a_format, int b_format, int64_t m, int64_t n, int64_t k, bool epilogue) {
  return gemm_workspace_bytes(known(a_format), known(b_format), m, n, k, epilogue);
}

void py_bias_grad(Operand dy, Operand out, MaybeOperand workspace) {
  Call call;
  BiasGradArgs a;
  a.dy = call.in(dy, "dy");
  a.out = call.out(out, "out");
  a.workspace = call.out(workspace, "workspace");
  run(bias_grad, a, call);
}

}  // namespace

void add_gemm(py::module_& m) {
  m.def("gemm", py_gemm, py::arg("a_data"), py::arg("a_scale_inv"), py::arg("a_amax"), py::arg("a_format"),
        py::arg("a_columnwise"), py::arg("b_data"), py::arg("b_scale_inv"), py::arg("b_amax"), py::arg("b_format"),
        py::arg("b_columnwise"), py::arg("d"), py::arg("c"), py::arg("bias"), py::arg("workspace"), py::arg("alpha"),
        py::arg("beta") DIPTYCH_GEMM_OPTIONS(DIPTYCH_ARG, bool));
  m.def("bias_grad", py_bias_grad, py::arg("dy"), py::arg("out"), py::arg("workspace"));
  m.def("gemm_workspace_bytes", py_gemm_workspace_bytes, py::arg("a_format"), py::arg("b_format"), py::arg("m"),
        py::arg("n"), py::arg("k"), py::arg("epilogue"));
  m.def("bias_grad_workspace_bytes", bias_grad_workspace_bytes, py::arg("m"), py::arg("n"));
}

}  // namespace diptych::bind
