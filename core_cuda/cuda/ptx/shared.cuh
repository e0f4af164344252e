// 32-bit addresses of shared memory, which many instructions take.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace diptych::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

}  // namespace diptych::cuda::ptx
