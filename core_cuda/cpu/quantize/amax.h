#pragma once

#include "cpu/source/source.h"

namespace diptych::cpu {

// All of them inside an IeeeScope.

// As the op: `out` one float, or one per row with kRowAmax; `columnwise_out` of the rotated tensor with kRht. Either
// may be null.
void amaxes_of(const Input&, int32_t flags, float* out, float* columnwise_out);

}  // namespace diptych::cpu
