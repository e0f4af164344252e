// The Python module's delayed scaling.
#include "families.h"
#include "program.h"

namespace diptych::bind {
namespace {

void py_log_amax(Operand amax_buffer, Operand log, Operand written) {
  Call call;
  run(log_amax, LogAmaxArgs{call.in(amax_buffer, "amax"), {call.out(log, "log"), call.out(written, "written")}}, call);
}

void py_scale_update(Operand history, Operand scale, MaybeOperand reduced, MaybeOperand amax_buffer,
                     Operand new_history, Operand new_scale, float fp8_max, int margin, bool most_recent,
                     MaybeOperand seen, MaybeOperand step, MaybeOperand pending, MaybeOperand log, MaybeOperand written,
                     MaybeOperand taken, MaybeOperand scale_out) {
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

}  // namespace

void add_scale_update(py::module_& m) {
  m.def("scale_update", py_scale_update, py::arg("history"), py::arg("scale"), py::arg("reduced"), py::arg("amax"),
        py::arg("new_history"), py::arg("new_scale"), py::arg("fp8_max"), py::arg("margin"), py::arg("most_recent"),
        py::arg("seen") = py::none(), py::arg("step") = py::none(), py::arg("pending") = py::none(),
        py::arg("log") = py::none(), py::arg("written") = py::none(), py::arg("taken") = py::none(),
        py::arg("scale_out") = py::none());
  m.def("log_amax", py_log_amax, py::arg("amax"), py::arg("log"), py::arg("written"));
}

}  // namespace diptych::bind
