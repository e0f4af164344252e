#pragma once

#include "diptych/tensor.h"

namespace diptych::cpu {

float amax_of(const TensorView& x);  // inside an IeeeScope

}  // namespace diptych::cpu
