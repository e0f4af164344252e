// Asynchronous copies between device and shared memory (sm_80 and later).
#pragma once

#include "cuda/ptx/shared.cuh"

namespace diptych::cuda::ptx {

// Copies 16 bytes, both addresses aligned to 16. If !inside, stores zeros and does not read `from`.
__device__ __forceinline__ void copy_async16(void* shared, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
}

// Copies 4 bytes, both addresses aligned to 4. If !inside, stores zeros and does not read `from`.
__device__ __forceinline__ void copy_async4(void* shared, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(from),
               "r"(inside ? 4 : 0)
               : "memory");
}

// Waits for this thread's copies; other threads see them after a barrier.
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- by the copy engine (sm_90 and later). PTX ISA: "cp.async.bulk" ----

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kBulk = true;  // whether there is a copy engine
#else
constexpr bool kBulk = false;
#endif

// Copies device memory to shared memory, in multiples of 16 bytes; `barrier` counts the bytes. The data is not read
// again, so its lines leave L2 first.
__device__ __forceinline__ void bulk_load_once(void* shared, const void* from, int bytes, uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(shared)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}
// Prefetches device memory to L2, in multiples of 16 bytes.
__device__ __forceinline__ void bulk_prefetch(const void* from, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}
// Copies shared memory to device memory, in multiples of 16 bytes, as part of the thread's next group.
__device__ __forceinline__ void bulk_store(void* to, const void* shared, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the stores of this thread's groups are complete: ordinary loads see them and ordinary stores overwrite
// them.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Waits until all of this thread's groups but the last kLater have been read from shared memory.
template <int kLater = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLater) : "memory");
}
// After it and a barrier, the copy engine and products may read this thread's earlier stores to shared memory.
__device__ __forceinline__ void bulk_sees_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace diptych::cuda::ptx
