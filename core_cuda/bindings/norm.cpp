// The Python module's norms.
#include "families.h"
#include "program.h"

namespace diptych::bind {
namespace {

void py_norm(Operand x, MaybeOperand gamma, MaybeOperand beta, MaybeOperand mu, Operand rsigma, MaybeOperand y,
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

void py_norm_grad(Operand dy, Operand x, Operand gamma, MaybeOperand mu, Operand rsigma, Operand dx, Operand dgamma,
                  MaybeOperand dbeta, MaybeOperand workspace, int norm_kind, bool zero_centered_gamma) {
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

}  // namespace

void add_norm(py::module_& m) {
  m.def("norm", py_norm, py::arg("x"), py::arg("gamma"), py::arg("beta"), py::arg("mu"), py::arg("rsigma"),
        py::arg("y"), py::arg("norm"), py::arg("eps"), py::arg("zero_centered_gamma"));
  m.def("norm_grad", py_norm_grad, py::arg("dy"), py::arg("x"), py::arg("gamma"), py::arg("mu"), py::arg("rsigma"),
        py::arg("dx"), py::arg("dgamma"), py::arg("dbeta"), py::arg("workspace"), py::arg("norm"),
        py::arg("zero_centered_gamma"));
  m.def("norm_grad_workspace_bytes", norm_grad_workspace_bytes, py::arg("m"), py::arg("k"));
}

}  // namespace diptych::bind
