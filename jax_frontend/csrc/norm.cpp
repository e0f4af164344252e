// The XLA handlers of norms.
#include <string>

#include "handler.h"

namespace diptych::xla_ffi {

// x, [gamma], [beta] -> [mu: layernorm], rsigma, [y]
Status run(Call& call, const NormAttributes& d) {
  return call.each([&] {
    Buffers t(call);
    NormArgs a;
    a.norm = static_cast<Norm>(d.kind);
    a.eps = d.eps;
    a.zero_centered_gamma = d.zero_centered_gamma != 0;
    a.x = t.in();
    a.gamma = t.in(d.has_y);
    a.beta = t.in(d.has_beta);
    a.mu = t.out(a.norm == Norm::layernorm);
    a.rsigma = t.out();
    a.y = t.out(d.has_y);
    return norm(a, call.exec());
  });
}

// dy, x, gamma, [mu: layernorm], rsigma -> dx, dgamma, [dbeta], [workspace: CUDA]
Status run(Call& call, const NormGradAttributes& d) {
  return call.each([&] {
    Buffers t(call);
    NormGradArgs a;
    a.norm = static_cast<Norm>(d.kind);
    a.zero_centered_gamma = d.zero_centered_gamma != 0;
    a.dy = t.in();
    a.x = t.in();
    a.gamma = t.in();
    a.mu = t.in(a.norm == Norm::layernorm);
    a.rsigma = t.in();
    a.dx = t.out();
    a.dgamma = t.out();
    a.dbeta = t.out(d.has_dbeta);
    a.workspace = t.out();
    return norm_grad(a, call.exec());
  });
}

}  // namespace diptych::xla_ffi

DIPTYCH_HANDLERS(norm, NormAttributes);
DIPTYCH_HANDLERS(norm_grad, NormGradAttributes);
