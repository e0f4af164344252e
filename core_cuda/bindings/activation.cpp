// The Python module's activations.
#include "families.h"
#include "program.h"

namespace diptych::bind {
namespace {

void py_activation(Operand x, Operand y, int kind, bool gated) {
  Call call;
  ActivationArgs a;
  a.x = call.in(x, "x");
  a.y = call.out(y, "y");
  a.kind = static_cast<Activation>(kind);
  a.gated = gated;
  run(activation, a, call);
}

void py_activation_grad(Operand dy, Operand x, Operand dx, int kind, bool gated) {
  Call call;
  ActivationGradArgs a;
  a.dy = call.in(dy, "dy");
  a.x = call.in(x, "x");
  a.dx = call.out(dx, "dx");
  a.kind = static_cast<Activation>(kind);
  a.gated = gated;
  run(activation_grad, a, call);
}

}  // namespace

void add_activation(py::module_& m) {
  m.def("activation", py_activation, py::arg("x"), py::arg("y"), py::arg("kind"), py::arg("gated"));
  m.def("activation_grad", py_activation_grad, py::arg("dy"), py::arg("x"), py::arg("dx"), py::arg("kind"),
        py::arg("gated"));
}

}  // namespace diptych::bind
