// Signals between thread blocks through device memory (sm_70 and later; the copy engine's fence: sm_90). PTX ISA:
// "ld.acquire", "st.release", "fence.proxy.async".
#pragma once

#include <cstdint>

namespace diptych::cuda::ptx {

// Returns the next of the numbers 0, 1, 2, ...; each is returned once.
__device__ __forceinline__ uint32_t next_ticket(uint32_t* counter) { return atomicAdd(counter, 1u); }

// Sets a flag. Whoever sees it set also sees all stores that this thread made, or that barriers made visible to it.
__device__ __forceinline__ void publish(uint32_t* flag) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(1) : "memory");
}

// Returns whether a flag is set; if so, the stores before `publish` are visible.
__device__ __forceinline__ bool published(const uint32_t* flag) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
  return v != 0;
}

// Adds one to a counter that `counted` reads, with the same guarantee as `publish`.
__device__ __forceinline__ void count_up(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ uint32_t counted(const uint32_t* counter) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}

// Orders this thread's accesses to device memory with those of the copy engine. Call it between stores and the signal
// for them, and between a signal that was seen and the copies that depend on it.
__device__ __forceinline__ void engine_sees_memory() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace diptych::cuda::ptx
