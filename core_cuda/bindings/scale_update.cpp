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

void py_scale_update_many(Calls calls) {
  Call call;
  ScaleUpdateManyArgs many;
  for (const py::handle one : calls) {
    const py::tuple t = call_of(one, 14, "scale_update_many");
    ScaleUpdateArgs a;
    a.history = a.new_history = call.out(t[0], "history");
    a.scale = a.new_scale = call.out(t[1], "scale");
    a.reduced = call.in(t[2], "reduced");
    a.amax = call.in(t[3], "amax");
    a.fp8_max = scalar<float>(t[4], "fp8_max");
    a.margin = scalar<int>(t[5], "margin");
    a.most_recent = scalar<bool>(t[6], "most_recent");
    a.seen = call.in(t[7], "seen");
    a.step = call.in(t[8], "step");
    a.pending = call.out(t[9], "pending");
    a.log = {call.in(t[10], "log"), call.in(t[11], "written")};
    a.taken = call.out(t[12], "taken");
    a.scale_out = call.out(t[13], "scale_out");
    many.each.push_back(a);
  }
  run(scale_update_many, many, call);
}

}  // namespace

void add_scale_update(py::module_& m) {
  m.def("scale_update", py_scale_update, py::arg("history"), py::arg("scale"), py::arg("reduced"), py::arg("amax"),
        py::arg("new_history"), py::arg("new_scale"), py::arg("fp8_max"), py::arg("margin"), py::arg("most_recent"),
        py::arg("seen") = py::none(), py::arg("step") = py::none(), py::arg("pending") = py::none(),
        py::arg("log") = py::none(), py::arg("written") = py::none(), py::arg("taken") = py::none(),
        py::arg("scale_out") = py::none());
  m.def("scale_update_many", py_scale_update_many, py::arg("calls"),
        "Updates many histories and scales in place. A call: (history, scale, reduced, amax, fp8_max, margin,\n"
        "most_recent, seen, step, pending, log, written, taken, scale_out), as for scale_update.");
  m.def("log_amax", py_log_amax, py::arg("amax"), py::arg("log"), py::arg("written"));
}

}  // namespace diptych::bind
