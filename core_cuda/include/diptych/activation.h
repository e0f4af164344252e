// Activations. All arithmetic is float32, each operation rounded.
//
//   y = act(a)            x [M, F] = a
//   y = act(a) * b        gated: x [M, 2F] = (a | b)
#pragma once

#include "diptych/op.h"

namespace diptych {

// Numbered as the frontends pass them.
enum class Activation : int32_t {
  gelu,   // x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)): the tanh form
  relu,   // max(x, 0)
  silu,   // x * sigmoid(x)
  srelu,  // max(x, 0)^2
  qgelu,  // x * sigmoid(1.702 x)
  count_
};

struct ActivationArgs {
  TensorView x;  // [..., F] or, gated, [..., 2F] float32 | bfloat16 | float16
  TensorView y;  // [..., F] float32 | bfloat16 | float16
  Activation kind = Activation::gelu;
  bool gated = false;
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(ActivationArgs& a, F&& f) {
  f(a.x), f(a.y, Role::output);
}

// dx = dy * act'(x); gated: (dy * b * act'(a) | dy * act(a))
struct ActivationGradArgs {
  TensorView dy;  // [..., F] float32 | bfloat16 | float16
  TensorView x;   // [..., F] or [..., 2F] float32 | bfloat16 | float16
  TensorView dx;  // x's shape, float32 | bfloat16 | float16
  Activation kind = Activation::gelu;
  bool gated = false;
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(ActivationGradArgs& a, F&& f) {
  f(a.dy), f(a.x), f(a.dx, Role::output);
}

DIPTYCH_OP(activation, ActivationArgs)
DIPTYCH_OP(activation_grad, ActivationGradArgs)

}  // namespace diptych
