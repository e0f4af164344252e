// The one place where kernels are launched: a grid along x only (y and z end at 65535), every launch checked.
#pragma once

#include <type_traits>

#include "cuda/device.h"

namespace diptych::cuda {

template <typename... Params>
Status launch(const char* name, void (*kernel)(Params...), int64_t blocks, int threads, size_t shared_bytes,
              void* stream, std::type_identity_t<Params>... args) {
  if (blocks > 0x7fffffff) {
    return {Code::unsupported, std::string(name) + ": the tensor needs " + std::to_string(blocks) +
                                   " thread blocks; a CUDA grid holds 2147483647"};
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(args...);
  return cuda_status(cudaGetLastError(), name);
}

}  // namespace diptych::cuda

#define DIPTYCH_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
