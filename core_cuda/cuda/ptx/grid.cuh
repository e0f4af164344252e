// Grids of one stream that overlap (sm_90 and later; before that they follow one another). The rules are with
// launch_after in cuda/launch.cuh. PTX ISA: "griddepcontrol".
#pragma once

#include <cstdint>

namespace diptych::cuda::ptx {

// The next grid of the stream may start, if it was launched so, once every thread block has said this or ended.
__device__ __forceinline__ void let_next_grid_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the grid before this one has ended and its stores are seen. Passes at once where that one had to end first.
__device__ __forceinline__ void wait_for_grid_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Loads of what nobody reads again. Unlike __ldg they stay behind the wait; so does any ordinary load.
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
