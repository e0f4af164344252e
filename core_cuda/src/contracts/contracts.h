// What every op asks of its arguments before any kernel starts.
#pragma once

#include <string>

#include "diptych/grouped.h"
#include "diptych/ops.h"

namespace diptych {

#define OP(name, Args, ...) Status check(const Args&, const Device&);
#include "diptych/ops.def"

std::string describe(const TensorView&);  // "float32[4, 8] on cpu"

// Extents of a gemm operand: `kept` rows or columns of D, `reduced` along k.
struct Extents {
  int64_t kept, reduced;
};
Extents extents(const QuantizedView&);

}  // namespace diptych
