// An operand of gemm as [outer, k], whichever copy it is, and its decoding into panels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/codec.h"
#include "cpu/isa.h"
#include "diptych/ops.h"

namespace diptych::cpu {

struct Operand {
  DType element, scale_dtype;
  bool k_major;  // data is [k, outer]
  int64_t outer, k;
  int64_t block_outer, block_k;  // block_k 0: one scale for all
  int64_t step_outer, step_k;    // the scale of (outer block i, k block j) lies at i * step_outer + j * step_k
  const uint8_t* data;
  const void* scale_inv;

  float scale(int64_t i, int64_t j) const {
    const int64_t at = i * step_outer + j * step_k;
    return scale_dtype == DType::f32 ? static_cast<const float*>(scale_inv)[at]
                                     : from_e8m0(static_cast<const uint8_t*>(scale_inv)[at]);
  }
};

inline Operand operand(const QuantizedView& q) {
  const FormatRow& f = row(q.format);
  Operand o{};
  o.element = f.element;
  o.scale_dtype = f.scale;
  o.k_major = q.columnwise && f.columnwise == ColumnwiseLayout::row_major;
  o.outer = o.k_major ? q.data.cols() : q.data.rows();
  o.k = o.k_major ? q.data.rows() : q.data.cols();
  o.data = q.data.as<const uint8_t>();
  o.scale_inv = q.scale_inv.data;
  o.block_k = f.block_cols;
  o.block_outer = f.block_rows;
  if (f.per_tensor()) return o;
  o.step_outer = o.k_major ? 1 : ceil_div(o.k, o.block_k);
  o.step_k = o.k_major ? ceil_div(o.outer, o.block_outer) : 1;
  return o;
}

// Rows first .. first + n of an operand, decoded: panels [k, width] and, per k-block, one float32 scale per row.
struct Packed {
  float* panels;
  float* scales;     // [blocks, scale_ld], zero past n
  int64_t scale_ld;  // n rounded up to whole micro-tiles
};

inline void pack_panel(const Kernels& simd, const Operand& o, int64_t first, int64_t n, int width, float* panel) {
  const int64_t ld = o.k_major ? o.outer : o.k;
  simd.pack(o.element, o.data + (o.k_major ? first : first * o.k), ld, o.k_major, n, o.k, width, panel);
}

inline void pack_scales(const Operand& o, int64_t first, int64_t n, int64_t block, int64_t blocks, const Packed& to) {
  for (int64_t b = 0; b < blocks; ++b) {
    float* out = to.scales + b * to.scale_ld;
    const int64_t j = o.block_k ? b * block / o.block_k : 0;
    if (!o.block_k) {
      std::fill(out, out + n, o.scale(0, 0));
    } else if (o.block_outer == 1) {
      for (int64_t i = 0; i < n; ++i) out[i] = o.scale(first + i, j);
    } else {
      for (int64_t i = 0; i < n;) {
        const int64_t at = (first + i) / o.block_outer;
        const int64_t end = std::min(n, (at + 1) * o.block_outer - first);
        std::fill(out + i, out + end, o.scale(at, j));
        i = end;
      }
    }
    std::fill(out + n, out + to.scale_ld, 0.0f);
  }
}

}  // namespace diptych::cpu
