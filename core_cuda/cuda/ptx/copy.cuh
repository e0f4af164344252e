// Asynchronous copies between device and shared memory (sm_80 and later).
#pragma once

#include "cuda/ptx/shared.cuh"

namespace diptych::cuda::ptx {

// 16 bytes, both sides aligned to 16; zeros where !inside, and `from` is not read then.
__device__ __forceinline__ void copy_async16(void* shared, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
}

// 4 bytes, both sides aligned to 4.
__device__ __forceinline__ void copy_async4(void* shared, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(from),
               "r"(inside ? 4 : 0)
               : "memory");
}

// Waits for this thread's copies; others see them after a barrier.
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- by the copy engine (sm_90 and later). PTX ISA: "cp.async.bulk" ----

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kBulk = true;  // there is one
#else
constexpr bool kBulk = false;
#endif

// Device memory to shared memory, all of it whole 16 bytes; `barrier` counts the bytes off. Nobody reads it again: its
// lines are the first that leave L2.
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
// Device memory to L2, all of it whole 16 bytes.
__device__ __forceinline__ void bulk_prefetch(const void* from, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}
// Shared memory to device memory, all of it whole 16 bytes, as a part of the thread's next group.
__device__ __forceinline__ void bulk_store(void* to, const void* shared, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until what this thread's groups store has been stored, and is seen by ordinary loads and overwritten by ordinary
// stores.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Until this thread's groups have been read from shared memory, but for the last kLater of them.
template <int kLater = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLater) : "memory");
}
// This thread's stores to shared memory so far may be read by the copy engine and by products, after a barrier.
__device__ __forceinline__ void bulk_sees_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace diptych::cuda::ptx
