// The XLA handler of delayed scaling.
#include <string>

#include "handler.h"

namespace diptych::xla_ffi {

// history, scale, [reduced], [amax] -> new history, new scale
Status run(Call& call, const ScaleUpdateAttributes& d) {
  return call.each([&] {
    Buffers t(call);
    ScaleUpdateArgs a;
    a.history = t.in();
    a.scale = t.in();
    a.reduced = t.in(d.has_reduced);
    a.amax = t.in(d.has_amax);
    a.new_history = t.out();
    a.new_scale = t.out();
    a.fp8_max = d.fp8_max;
    a.margin = d.margin;
    a.most_recent = d.most_recent != 0;
    return scale_update(a, call.exec());
  });
}

}  // namespace diptych::xla_ffi

DIPTYCH_HANDLERS(scale_update, ScaleUpdateAttributes);
