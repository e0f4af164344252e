// One copy of a quantized [m, k] tensor as quantize and dequantize see it: a grid of blocks over the tensor itself,
// whatever the orientation of the copy's storage. All of it follows from the format's row.
#pragma once

#include <algorithm>
#include <cstdint>

#include "diptych/ops.h"

namespace diptych::cpu {

struct BlockedCopy {
  int64_t rows, cols;      // block size in the tensor's orientation; the whole tensor where the scale is one
  bool transposed;         // data is [k, m]
  int64_t step_i, step_j;  // the scale of block (i, j) lies at i * step_i + j * step_j
  uint8_t* data;
  void* scale_inv;
};

inline BlockedCopy blocked_copy(const FormatRow& f, const QuantizedView& q, int64_t m, int64_t k) {
  BlockedCopy c{};
  c.data = q.data.as<uint8_t>();
  c.scale_inv = q.scale_inv.data;
  c.transposed = q.columnwise && f.columnwise == ColumnwiseLayout::transposed;
  if (f.per_tensor()) {
    c.rows = std::max<int64_t>(m, 1);
    c.cols = std::max<int64_t>(k, 1);
    return c;
  }
  c.rows = q.columnwise ? f.block_cols : f.block_rows;
  c.cols = q.columnwise ? f.block_rows : f.block_cols;
  c.step_i = c.transposed ? 1 : ceil_div(k, c.cols);
  c.step_j = c.transposed ? ceil_div(m, c.rows) : 1;
  return c;
}

}  // namespace diptych::cpu
