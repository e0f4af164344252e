// One copy of a quantized [m, k] tensor as a grid of blocks over the tensor, whichever orientation the copy is stored
// in. The format's row determines all of it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/quantize/codec.h"
#include "diptych/quantize.h"

namespace diptych::cpu {

struct BlockedCopy {
  int64_t rows, cols;      // block size in the tensor's orientation
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
  const Block block = f.block(q.columnwise);
  c.rows = block.rows ? block.rows : std::max<int64_t>(m, 1);
  c.cols = block.cols ? block.cols : std::max<int64_t>(k, 1);
  c.step_i = c.transposed ? 1 : block_count(k, block.cols);
  c.step_j = c.transposed ? block_count(m, block.rows) : 1;
  return c;
}

// Returns element `at` of the stored block scales as float32.
inline float block_scale(DType dtype, const void* scale_inv, int64_t at) {
  if (dtype == DType::f32) return static_cast<const float*>(scale_inv)[at];
  const uint8_t code = static_cast<const uint8_t*>(scale_inv)[at];
  return dtype == DType::e4m3 ? decode<E4M3, float>(int32_t{code}) : from_e8m0(code);
}

// kAmaxUnit[n]: the factor of the amaxes of n two-level operands; 2688 is E4M3's maximum times E2M1's.
inline constexpr float kAmaxUnit[] = {1.0f, static_cast<float>(1.0 / 2688), static_cast<float>(1.0 / (2688 * 2688))};

}  // namespace diptych::cpu
