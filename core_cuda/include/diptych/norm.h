// Norms. All arithmetic is float32, each operation rounded.
//
//   y = ((x - mu) * rsigma) * g + beta       g is gamma, or 1 + gamma if zero-centered; rmsnorm: mu = 0, no beta
#pragma once

#include "diptych/op.h"

namespace diptych {

// Numbered as the frontends pass them.
enum class Norm : int32_t { layernorm, rmsnorm, count_ };

struct NormArgs {
  TensorView x;       // [..., K] float32 | bfloat16 | float16
  TensorView gamma;   // [K], with y only
  TensorView beta;    // [K], with y only; optional, layernorm only
  TensorView mu;      // [M] float32, layernorm only: output
  TensorView rsigma;  // [M] float32: output, 1 / sqrt(variance (rmsnorm: mean square) + eps)
  TensorView y;       // [..., K] float32 | bfloat16 | float16, optional: without it only mu and rsigma are computed
  Norm norm = Norm::layernorm;
  float eps = 0.0f;
  bool zero_centered_gamma = false;
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(NormArgs& a, F&& f) {
  f(a.x), f(a.gamma), f(a.beta), f(a.mu, Role::output), f(a.rsigma, Role::output), f(a.y, Role::output);
}

// xhat = (x - mu) * rsigma, h = g * dy:
//   dx = rsigma * ((h - mean(h)) - xhat * mean(h * xhat))       rmsnorm: without mean(h)
//   dgamma = sum over rows of dy * xhat, dbeta = sum over rows of dy
struct NormGradArgs {
  TensorView dy;         // [..., K] float32 | bfloat16 | float16
  TensorView x;          // [..., K] float32 | bfloat16 | float16
  TensorView gamma;      // [K]
  TensorView mu;         // [M] float32, layernorm only
  TensorView rsigma;     // [M] float32
  TensorView dx;         // [..., K] of x's dtype
  TensorView dgamma;     // [K] of gamma's dtype
  TensorView dbeta;      // [K] of gamma's dtype; optional, layernorm only
  TensorView workspace;  // uint8, at least norm_grad_workspace_bytes, 16-byte aligned; CUDA only
  Norm norm = Norm::layernorm;
  bool zero_centered_gamma = false;
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(NormGradArgs& a, F&& f) {
  f(a.dy), f(a.x), f(a.gamma), f(a.mu), f(a.rsigma), f(a.dx, Role::output), f(a.dgamma, Role::output),
      f(a.dbeta, Role::output), f(a.workspace, Role::workspace);
}

DIPTYCH_OP(norm, NormArgs)
DIPTYCH_OP(norm_grad, NormGradArgs)

// CUDA workspace size, a function of the shape alone.
int64_t norm_grad_workspace_bytes(int64_t m, int64_t k);

}  // namespace diptych
