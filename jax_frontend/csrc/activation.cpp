// The XLA handlers of activations.
#include <string>

#include "handler.h"

namespace diptych::xla_ffi {

// x -> y
Status run(Call& call, const ActivationAttributes& d) {
  return call.each([&] {
    return activation({call.in(0), call.out(0), static_cast<Activation>(d.kind), d.gated != 0}, call.exec());
  });
}

// dy, x -> dx
Status run(Call& call, const ActivationGradAttributes& d) {
  return call.each([&] {
    return activation_grad({call.in(0), call.in(1), call.out(0), static_cast<Activation>(d.kind), d.gated != 0},
                           call.exec());
  });
}

}  // namespace diptych::xla_ffi

DIPTYCH_HANDLERS(activation, ActivationAttributes);
DIPTYCH_HANDLERS(activation_grad, ActivationGradAttributes);
