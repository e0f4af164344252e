// Tensor maps, which describe a tensor to Hopper's copy engine. The driver makes them on the host; its entry point is
// looked up at run time, so that nothing links against libcuda.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "diptych/status.h"

namespace diptych::cuda {

// Returns whether the driver can make tensor maps.
bool tensor_maps_available();

// Makes the map of a byte tensor of `rank` dimensions, the innermost (contiguous) one first, that is copied in boxes.
// Rows of a box lie in shared memory with the 128-byte swizzle, so box[0] must be 128. The base and the strides must be
// multiples of 16 bytes.
Status make_tensor_map(CUtensorMap* map, const void* base, int rank, const int64_t* extents, const int32_t* box);

}  // namespace diptych::cuda
