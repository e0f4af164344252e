// Copies of boxes of a tensor between device and shared memory by the copy engine, described by a tensor map (sm_90 and
// later). PTX ISA: "cp.async.bulk.tensor", "prefetch.tensormap". Elements outside of the tensor are loaded as zeros,
// and the barrier always counts the bytes of the whole box; stores outside of the tensor are dropped.
#pragma once

#include <cuda.h>

#include "cuda/ptx/barrier.cuh"

namespace diptych::cuda::ptx {

__device__ __forceinline__ void prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Element (x, y) is the box's first; x runs along the innermost dimension.
__device__ __forceinline__ void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
      : "memory");
}

__device__ __forceinline__ void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Stores a box from shared memory, as part of this thread's group of copies (copy.cuh).
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* shared, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(shared_address(shared)), "r"(x), "r"(y), "r"(z)
               : "memory");
}

// Copies a box to the same address in every thread block of the cluster whose bit is set in `ranks`; the same barrier
// of each counts its bytes.
__device__ __forceinline__ void copy_box_to(uint32_t ranks, void* shared, const CUtensorMap* map, uint64_t* barrier,
                                            int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%4, %5, %6}], [%2], %3;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>(ranks)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void copy_box_to(uint32_t ranks, void* shared, const CUtensorMap* map, uint64_t* barrier,
                                            int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%4, %5}], [%2], %3;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>(ranks)), "r"(x), "r"(y)
      : "memory");
}

}  // namespace diptych::cuda::ptx
