// Much to move: whole rows through shared memory and registers, all of a device's SMs reading at one time.
#pragma once

#include "cuda/kernels.h"

namespace diptych::cuda {

bool slices_pay(const PermuteArgs&, const Execution&);
Status permute_slices(const PermuteArgs&, const Execution&);  // where they pay

}  // namespace diptych::cuda
