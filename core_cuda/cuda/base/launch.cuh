// All kernels are launched here: with a grid along x only (y and z are limited to 65535), and with every launch
// checked.
#pragma once

#include <atomic>
#include <type_traits>

#include "cuda/base/device.h"

namespace diptych::cuda {

inline Status fits_grid(const char* name, int64_t blocks) {
  if (blocks <= 0x7fffffff) return {};
  return {Code::unsupported, std::string(name) + ": the tensor needs " + std::to_string(blocks) +
                                 " thread blocks; a CUDA grid holds 2147483647"};
}

template <typename... Params>
Status launch(const char* name, void (*kernel)(Params...), int64_t blocks, int threads, size_t shared_bytes,
              void* stream, std::type_identity_t<Params>... args) {
  DIPTYCH_TRY(fits_grid(name, blocks));
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(args...);
  return cuda_status(cudaGetLastError(), name);
}

// Returns whether a device may start kernels before the stream's last one has ended. Only kernels compiled for sm_90 or
// later can wait for it, and stream captures support that since CUDA 12.3. All kernels are compiled alike, so the first
// one tested answers for all.
inline bool grids_overlap(const void* kernel, int device) {
  static std::atomic<uint64_t> asked{0}, yes{0};
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (asked.load(std::memory_order_acquire) & bit) return yes.load(std::memory_order_relaxed) & bit;
  int driver = 0;
  cudaFuncAttributes code = {};
  const bool overlap = cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030 &&
                       cudaFuncGetAttributes(&code, kernel) == cudaSuccess && code.ptxVersion >= 90;
  if (overlap) yes.fetch_or(bit, std::memory_order_relaxed);
  asked.fetch_or(bit, std::memory_order_release);
  return overlap;
}

// Returns the attribute that lets a kernel start while the stream's last one runs.
inline cudaLaunchAttribute overlaps() {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  return overlap;
}

// `attributes`: `count` additional launch attributes.
template <typename... Params>
Status launch_with(const char* name, cudaLaunchAttribute* attributes, unsigned count, void (*kernel)(Params...),
                   int64_t blocks, int threads, size_t shared_bytes, void* stream,
                   const std::type_identity_t<Params>&... args) {
  DIPTYCH_TRY(fits_grid(name, blocks));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes, config.numAttrs = count;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, args...), name);
}

// Launches a kernel that may start while the stream's last one runs, so that its launch costs no time (ptx/grid.cuh):
//  - It calls wait_for_grid_before before it touches anything that an earlier kernel may have written or may still
//    read: its inputs, and its outputs too. The wait covers only the grid before it, whoever launched that; therefore
//  - every thread block of such a kernel waits, so that its end implies the end of all earlier grids, and
//  - only our own kernels call let_next_grid_start. A kernel that was launched the ordinary way may always call it.
//  - Before the wait a kernel may read data that existed before our last ordinary launch, if the same function made
//    both launches one after the other, and write memory that that launch does not touch: the second kernel of
//    permute_map reads the routing and writes -1 to row_id_map.
//  - permute's slices follow each other in one function, and so do quantize's strips. The first lets the next one start
//    after its own wait, so that all may touch what the first one waited for; each still waits before it ends.
//  - Prefetches into L2 may come before the wait, because L2 sees later writes.
//  - Data that an earlier grid has written is read by ordinary loads. __ldg promises that nobody writes the data while
//    the kernel runs, so the compiler may move it before the wait.
template <typename... Params>
Status launch_after(const char* name, void (*kernel)(Params...), int64_t blocks, int threads, size_t shared_bytes,
                    const Execution& exec, const std::type_identity_t<Params>&... args) {
  cudaLaunchAttribute overlap = overlaps();
  const unsigned count = grids_overlap(reinterpret_cast<const void*>(kernel), exec.device.index) ? 1 : 0;
  return launch_with(name, &overlap, count, kernel, blocks, threads, shared_bytes, exec.stream, args...);
}

// Launches clusters of `cluster` thread blocks, which can access each other's shared memory (sm_90 and later).
// `after`: the kernel obeys the rules of launch_after.
template <typename... Params>
Status launch_clusters(const char* name, void (*kernel)(Params...), int64_t blocks, int cluster, int threads,
                       size_t shared_bytes, const Execution& exec, bool after,
                       const std::type_identity_t<Params>&... args) {
  cudaLaunchAttribute attributes[2] = {{}, overlaps()};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  const bool may = after && grids_overlap(reinterpret_cast<const void*>(kernel), exec.device.index);
  return launch_with(name, attributes, may ? 2 : 1, kernel, blocks, threads, shared_bytes, exec.stream, args...);
}

// Permits a kernel more than 48 KiB of shared memory, once for each device; repeating it is harmless. `carveout`:
// percent of an SM's L1 to use as shared memory. Kernels overlap on an SM only if they agree on it; -1 leaves it to the
// driver.
class SharedGrant {
 public:
  template <typename Kernel>
  Status raise(Kernel* kernel, int device, int bytes, int carveout = cudaSharedmemCarveoutDefault) {
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if (granted_.load(std::memory_order_relaxed) & bit) return {};
    const void* function = reinterpret_cast<const void*>(kernel);
    DIPTYCH_CUDA_TRY(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    if (carveout != cudaSharedmemCarveoutDefault) {
      DIPTYCH_CUDA_TRY(cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, carveout));
    }
    granted_.fetch_or(bit, std::memory_order_relaxed);
    return {};
  }

 private:
  std::atomic<uint64_t> granted_{0};
};

}  // namespace diptych::cuda

#define DIPTYCH_DYNAMIC_SHARED_ALIGNED(name, bytes) \
  extern __shared__ __align__(bytes)                \
  unsigned char name[]
#define DIPTYCH_DYNAMIC_SHARED(name) DIPTYCH_DYNAMIC_SHARED_ALIGNED(name, 16)
