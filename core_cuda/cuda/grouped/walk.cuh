// The groups' boundaries: offsets are read and made safe on the device.
//
// Boundary i of R rows is 0 for i = 0, offsets[i - 1] for 1 <= i <= G + 1, R for i = G + 2, each at least the one
// before it and at most R. Span s lies between boundaries s and s + 1: span 0 and span G + 1 are rows in no group, span
// s is group s - 1.
#pragma once

#include <cstdint>

#include "cuda/base/vector.cuh"

namespace diptych::cuda {

struct Groups {
  const int32_t* offsets;  // null: one group of all rows
  int count;               // G
  int rows;                // R
};

// Returns boundary base + lane in each lane of a warp. `highest` carries the largest boundary from call to call and is
// 0 at first. The grid before may have written the offsets, so they are read by ordinary loads (launch.cuh).
__device__ __forceinline__ int boundary(const Groups& g, int base, int lane, int& highest) {
  const int i = base + lane;
  int v = i == 0 ? 0 : i <= g.count + 1 ? g.offsets ? g.offsets[i - 1] : i > 1 ? g.rows : 0 : g.rows;
  v = min(v, g.rows);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, v, step);
    if (lane >= step) v = max(v, other);
  }
  v = max(v, highest);
  highest = __shfl_sync(kAllLanes, v, 31);
  return v;
}

// Returns the sum of v over this lane and all lower ones.
__device__ __forceinline__ int running_sum(int v, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, v, step);
    if (lane >= step) v += other;
  }
  return v;
}

}  // namespace diptych::cuda
