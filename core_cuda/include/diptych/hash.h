// A hash of a tensor's bits (NUMERICS 10). The op is in lone_ops.def, and its header not in ops.h: no other kernel
// depends on it.
#pragma once

#include "diptych/status.h"
#include "diptych/tensor.h"

namespace diptych {

struct HashArgs {
  TensorView x;    // of any shape, read as bytes
  TensorView out;  // [4] int32, aligned to 8 bytes
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(HashArgs& a, F&& f) {
  f(a.x), f(a.out, Role::output);
}

Status hash(const HashArgs&, const Execution&);

// The kernels that registry.cpp names. Arguments arrive checked.
namespace cpu {
Status hash(const HashArgs&, const Execution&);
}
namespace cuda {
Status hash(const HashArgs&, const Execution&);
}

}  // namespace diptych
