#pragma once

#include "cpu/source/source.h"

namespace diptych::cpu {

// Computes amaxes as the op does: `out` is one float, or one per row with kRowAmax; `columnwise_out` is the amax of the
// rotated tensor with kRht. Either may be null. Call it inside an IeeeScope.
void amaxes_of(const Input&, int32_t flags, float* out, float* columnwise_out);

}  // namespace diptych::cpu
