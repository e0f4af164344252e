// A hash of a tensor's bits (NUMERICS 10).
#pragma once

#include "diptych/op.h"

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

DIPTYCH_OP(hash, HashArgs)

}  // namespace diptych
