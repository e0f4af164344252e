// Delayed scaling: the log of amaxes, and the update of scales from histories.
#pragma once

#include "diptych/op.h"

namespace diptych {

// A ring [n, R] of amaxes. Entries are numbered from 0 and entry i lies in column i % R. `log_amax` writes entries and
// counts them in `written`; the reader counts in `taken` how many it has read, so that each side only writes its own
// counter. If a counter is negative or `taken` exceeds `written`, the op fails, on CUDA with a trap, and accesses
// nothing outside of the log.
struct AmaxLog {
  TensorView amaxes;   // [n, R] float32
  TensorView written;  // [1] int64

  bool given() const { return amaxes.given(); }
};

struct LogAmaxArgs {
  TensorView amax;  // [n] float32
  AmaxLog log;      // amax becomes its next entry
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(LogAmaxArgs& a, F&& f) {
  f(a.amax), f(a.log.amaxes, Role::output), f(a.log.written, Role::in_place);
}

// Delayed scaling's update of n tensors that share an element (NUMERICS 2). Outputs may be the inputs themselves.
// Where `seen` equals `step` the inputs are copied to the outputs unchanged. CUDA compares them inside the kernel, so
// that a captured graph updates once in a step however often it runs. The op does not write `seen`, which several calls
// may share; the caller does.
struct ScaleUpdateArgs {
  TensorView history;  // [n, L] float32
  TensorView scale;    // [n] float32
  TensorView reduced;  // [n] float32, optional: amaxes after reduction over a process group
  TensorView amax;     // [n] float32, optional: chosen by a caller's own algorithm, used where the latest amax is not 0
  TensorView new_history;  // [n, L] float32
  TensorView new_scale;    // [n] float32
  TensorView seen;         // [1] int64, optional: the step of the last update
  TensorView step;         // [1] int64, with seen: this step
  // Before the update history[., 0] is raised to the amaxes in pending and log, also where `seen` equals `step`. They
  // need a history that is updated in place.
  TensorView pending;    // [n] float32, optional: set to 0 afterwards
  AmaxLog log;           // optional: read from entry `taken` on. More than R new entries are an error, on CUDA a trap
  TensorView taken;      // [n] int64, with log
  TensorView scale_out;  // [n] float32, optional: another copy of new_scale
  float fp8_max = 448.0f;
  int32_t margin = 0;
  bool most_recent = false;  // scale from the latest amax, else from the maximum of the history
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(ScaleUpdateArgs& a, F&& f) {
  f(a.history, Role::in_place), f(a.scale, Role::in_place), f(a.reduced), f(a.amax);
  f(a.new_history, Role::output), f(a.new_scale, Role::output), f(a.scale_out, Role::output), f(a.seen), f(a.step);
  f(a.pending, Role::in_place), f(a.log.amaxes), f(a.log.written), f(a.taken, Role::in_place);
}

DIPTYCH_OP(log_amax, LogAmaxArgs)
DIPTYCH_OP(scale_update, ScaleUpdateArgs)

}  // namespace diptych
