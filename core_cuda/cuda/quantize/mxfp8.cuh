// Tiles of 32 x 64 elements with E8M0 scales. A warp owns a tile, a thread an 8 x 8 patch of it: patch column lane % 8,
// patch row lane / 8. Every block lies inside one warp, so there is no shared memory and no barrier.
#pragma once

#include "cuda/base/vector.cuh"
#include "cuda/quantize/quantize.h"
#include "cuda/source/source.cuh"

namespace diptych::cuda {

constexpr int kMxBlock = 32, kMxRows = 32, kMxCols = 64, kMxThreads = 256;

struct MxArgs {
  SourceArgs in;
  int64_t m, k;
  unsigned tiles, tiles_k;   // warp tiles, and how many of them along k
  int64_t blocks_k;          // ceil(k / 32)
  uint8_t *row, *row_scale;  // [m, k] and [m, ceil(k/32)], or null
  uint8_t *col, *col_scale;  // [m, k] and [ceil(m/32), k], or null
  float max_reciprocal;      // float32(1 / the element's largest value)
  bool square;
  bool vec_row, vec_col;  // the copy and its rows are aligned to 8 bytes
};

// permuted_mxfp8 makes only the columnwise copy of permuted rows of 16-bit elements, without square blocks. `fits`
// returns whether it takes the arguments.
bool permuted_mxfp8_fits(const MxArgs&);
Status permuted_mxfp8(const MxArgs&, DType element, const Execution&);

}  // namespace diptych::cuda
