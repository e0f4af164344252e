// Overlap of the grids of one stream (sm_90 and later; on older chips they run one after the other). The rules are at
// launch_after in cuda/base/launch.cuh. PTX ISA: "griddepcontrol".
#pragma once

#include <cstdint>

namespace diptych::cuda::ptx {

// The next grid of the stream, if launch_after launched it, may start once every thread block has called this or ended.
__device__ __forceinline__ void let_next_grid_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the grid before this one has ended and its stores are visible. Returns at once if that had to end first.
__device__ __forceinline__ void wait_for_grid_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Loads data that is not read again. Unlike __ldg these loads stay after the wait, as any ordinary load does.
__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ unsigned load_once(const unsigned* p) {
  unsigned v;
  asm volatile("ld.global.cs.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ unsigned char load_once(const unsigned char* p) {
  unsigned v;
  asm volatile("ld.global.cs.u8 %0, [%1];" : "=r"(v) : "l"(p));
  return static_cast<unsigned char>(v);
}

}  // namespace diptych::cuda::ptx
