// Scales of 128 rows of a tile, on their way to where they belong. There a tile has 4 bytes of each row, and writing
// those costs L2 as much as whole sectors of 32 would; so a tile leaves them as a run, one behind the other, in the
// memory that the scales of its rows will fill, and a second kernel puts all of that memory in order.
#pragma once

#include "cuda/quantize/tiles.cuh"

namespace diptych::cuda {

struct ScaleRuns {
  uint32_t* data = nullptr;  // will be [rows, tiles] words: a float32 scale or four E8M0 codes; null: none
  int64_t rows = 0, tiles = 0;

  // Of rows row0 .. row0 + count - 1, count <= 128, in tile `tile`; row0 is a multiple of 128.
  __device__ __forceinline__ uint32_t* run(int64_t row0, int count, uint32_t tile) const {
    return data + row0 * tiles + static_cast<int64_t>(tile) * count;
  }
};

// Whether shared memory holds what 128 rows have: `clustered`, that of eight thread blocks (sm_90 and later), else of
// one.
bool scale_runs_fit(int64_t tiles, bool clustered);

// Both, after the kernel before this one. `columns` may be none; they may be long, so that clusters take them.
Status order_scales(const ScaleRuns& rows, const ScaleRuns& columns, const Execution&);

}  // namespace diptych::cuda
