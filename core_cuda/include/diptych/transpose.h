// Transposes matrices of bytes.
#pragma once

#include "diptych/op.h"

namespace diptych {

// out[..., c, r] = in[..., r, c]: the columnwise payload of tensors in square blocks, or with one scale, from the
// rowwise one.
struct TransposeArgs {
  TensorView in;   // [..., R, C], one byte an element
  TensorView out;  // [..., C, R] of the same dtype
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(TransposeArgs& a, F&& f) {
  f(a.in), f(a.out, Role::output);
}

DIPTYCH_OP(transpose, TransposeArgs)

}  // namespace diptych
