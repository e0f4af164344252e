// The checks of each op's arguments, which run before any kernel starts.
#pragma once

#include <string>

#include "diptych/ops.h"

namespace diptych {

#define OP(name, Args, ...) Status check(const Args&, const Device&);
#include "diptych/ops.def"

std::string describe(const TensorView&);  // "float32[4, 8] on cpu"

// The extents of a gemm operand: `kept` is M or N, `reduced` is K.
struct Extents {
  int64_t kept, reduced;
};
Extents extents(const QuantizedView&);

}  // namespace diptych
