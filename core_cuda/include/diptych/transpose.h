// Transposes matrices of bytes. The op is in lone_ops.def, and its header not in ops.h: no other kernel depends on it.
#pragma once

#include "diptych/status.h"
#include "diptych/tensor.h"

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

Status transpose(const TransposeArgs&, const Execution&);

// The kernels that registry.cpp names. Arguments arrive checked.
namespace cpu {
Status transpose(const TransposeArgs&, const Execution&);
}
namespace cuda {
Status transpose(const TransposeArgs&, const Execution&);
}

}  // namespace diptych
