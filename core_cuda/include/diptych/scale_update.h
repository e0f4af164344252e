// Delayed scaling: logs of amaxes, and the update of scales from histories.
#pragma once

#include "diptych/status.h"
#include "diptych/tensor.h"

namespace diptych {

// Amaxes [n, R] by their number, which alone grows: number i lies in column i % R. `log_amax` writes them, and who
// reads them keeps the number that it has `taken`, so that one side writes and the other reads. Numbers are not
// negative, and none is taken that is not written: else the op fails, on CUDA by a trap, and touches nothing outside of
// the log.
struct AmaxLog {
  TensorView amaxes;   // [n, R] float32
  TensorView written;  // [1] int64

  bool given() const { return amaxes.given(); }
};

struct LogAmaxArgs {
  TensorView amax;  // [n] float32
  AmaxLog log;      // gets it as its next
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(LogAmaxArgs& a, F&& f) {
  f(a.amax), f(a.log.amaxes, Role::output), f(a.log.written, Role::in_place);
}

// Delayed scaling's update of n tensors that share an element (NUMERICS 2). Outputs may be the inputs themselves.
// Where `seen` equals `step` the outputs are the inputs, unchanged. CUDA compares them inside the kernel, so that a
// captured graph updates once in a step however often it runs. Several calls may share `seen`: the caller writes it.
struct ScaleUpdateArgs {
  TensorView history;      // [n, L] float32
  TensorView scale;        // [n] float32
  TensorView reduced;      // [n] float32, optional: amaxes after reduction over a group
  TensorView amax;         // [n] float32, optional: chosen by a caller's own algorithm, where last != 0
  TensorView new_history;  // [n, L] float32
  TensorView new_scale;    // [n] float32
  TensorView seen;         // [1] int64, optional: the step of the last update
  TensorView step;         // [1] int64, with seen: this step
  // Amaxes that belong into history[., 0], which gets them also where `seen` equals `step`. History is updated in
  // place.
  TensorView pending;    // [n] float32, optional: zeroed
  AmaxLog log;           // optional: from number `taken` on. More than R of them is an error, on CUDA a trap
  TensorView taken;      // [n] int64, with log
  TensorView scale_out;  // [n] float32, optional: gets what new_scale does
  float fp8_max = 448.0f;
  int32_t margin = 0;
  bool most_recent = false;  // else the maximum of the history
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(ScaleUpdateArgs& a, F&& f) {
  f(a.history, Role::in_place), f(a.scale, Role::in_place), f(a.reduced), f(a.amax);
  f(a.new_history, Role::output), f(a.new_scale, Role::output), f(a.scale_out, Role::output), f(a.seen), f(a.step);
  f(a.pending, Role::in_place), f(a.log.amaxes), f(a.log.written), f(a.taken, Role::in_place);
}

Status log_amax(const LogAmaxArgs&, const Execution&);
Status scale_update(const ScaleUpdateArgs&, const Execution&);

}  // namespace diptych
