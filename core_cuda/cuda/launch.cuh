// The one place where kernels are launched: a grid along x only (y and z end at 65535), every launch checked.
#pragma once

#include <atomic>
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

// The same in clusters of `cluster` thread blocks, which share their memory (sm_90 and later).
template <typename... Params>
Status launch_clusters(const char* name, void (*kernel)(Params...), int64_t blocks, int cluster, int threads,
                       size_t shared_bytes, void* stream, const std::type_identity_t<Params>&... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, args...), name);
}

// More than 48 KiB of shared memory is granted for each kernel and device; asking twice is harmless.
class SharedGrant {
 public:
  template <typename Kernel>
  Status raise(Kernel* kernel, int device, int bytes) {
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if (granted_.load(std::memory_order_relaxed) & bit) return {};
    DIPTYCH_CUDA_TRY(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    granted_.fetch_or(bit, std::memory_order_relaxed);
    return {};
  }

 private:
  std::atomic<uint64_t> granted_{0};
};

}  // namespace diptych::cuda

#define DIPTYCH_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
