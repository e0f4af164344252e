// Tensor maps: what Hopper's copy engine has to know of a tensor. Made on the host by the driver, which is asked for at
// run time: nothing links against libcuda.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "diptych/status.h"

namespace diptych::cuda {

// Whether the driver makes tensor maps.
bool tensor_maps_available();

// A byte tensor of `rank` dimensions, the innermost (contiguous) one first, read in boxes; rows of a box lie in shared
// memory with the 128-byte swizzle, so that box[0] is 128. The base and the strides are multiples of 16 bytes.
Status make_tensor_map(CUtensorMap* map, const void* base, int rank, const int64_t* extents, const int32_t* box);

}  // namespace diptych::cuda
