// Stands in for what the simulated kernels use of cuda/ptx/mma.cuh.
#pragma once

#include "simulated.h"

namespace diptych::cuda::ptx {

inline void stmatrix_x4(void* shared_row, const uint32_t (&r)[4]) {
  const int lane = simulated::self->index % 32;
  simulated::address(shared_row);
  const uint64_t* rows = simulated::exchange(reinterpret_cast<uintptr_t>(shared_row));
  for (int i = 0; i < 4; ++i) {
    std::memcpy(reinterpret_cast<unsigned char*>(rows[i * 8 + lane / 4]) + lane % 4 * 4, &r[i], 4);
  }
  __syncwarp();
}

}  // namespace diptych::cuda::ptx
