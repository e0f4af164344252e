// An operand of gemm as [outer, k], from either copy, and its decoding into panels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/base/scratch.h"
#include "cpu/isa/isa.h"
#include "cpu/quantize/blocks.h"
#include "diptych/gemm.h"

namespace diptych::cpu {

struct Operand {
  DType element, scale_dtype;
  bool k_major;  // data is [k, outer]
  int64_t outer, k;
  int64_t block_outer, block_k;  // 0: the whole extent
  int64_t step_outer, step_k;    // the scale of (outer block i, k block j) lies at i * step_outer + j * step_k
  const uint8_t* data;
  const void* scale_inv;
  const float* amax;  // two-level formats: one for all, or one per outer index; null elsewhere
  bool amax_each;

  float scale(int64_t i, int64_t j) const { return block_scale(scale_dtype, scale_inv, i * step_outer + j * step_k); }
  float times_amax(float alpha, int64_t i) const { return amax ? alpha * amax[amax_each ? i : 0] : alpha; }
};

inline Operand operand(const QuantizedView& q) {
  const FormatRow& f = row(q.format);
  Operand o{};
  o.element = f.element;
  o.scale_dtype = f.scale;
  o.k_major = q.columnwise && f.columnwise == ColumnwiseLayout::row_major;
  o.outer = o.k_major ? q.data.cols() : q.data.rows();
  o.k = o.k_major ? q.data.rows() : q.data.cols() * f.pack();
  o.data = q.data.as<const uint8_t>();
  o.scale_inv = q.scale_inv.data;
  o.block_k = f.block_cols;
  o.block_outer = f.block_rows;
  if (f.rule == ScaleRule::two_level) {
    o.amax = q.amax.as<const float>();
    o.amax_each = q.amax.numel() != 1;
  }
  o.step_outer = o.k_major ? 1 : block_count(o.k, f.block_cols);
  o.step_k = o.k_major ? block_count(o.outer, f.block_rows) : 1;
  return o;
}

// A range of the reduced axis.
struct Part {
  int64_t begin, length;
};

// Decodes rows first .. first + n - 1 of an operand to a panel [k.length, width]; n <= width, columns past n are zero.
inline void pack_panel(const Kernels& simd, const Operand& o, int64_t first, int64_t n, Part k, int width,
                       float* panel) {
  if (o.element == DType::e2m1) {
    // Bytes are unpacked whole, so one extra element may lie before the part and one after it.
    const bool whole = k.length == o.k;
    const int64_t odd = k.begin % 2, ld = whole ? o.k : ceil_div(odd + k.length, 2) * 2;
    uint8_t* codes = scratch(Slot::bytes).get<uint8_t>(n * ld);
    const uint8_t* src = o.data + (first * o.k + k.begin) / 2;
    for (int64_t i = 0; i < (whole ? 1 : n); ++i) simd.unpack(src + i * o.k / 2, whole ? n * ld : ld, codes + i * ld);
    simd.pack(DType::e4m3, codes + odd, ld, false, n, k.length, width, panel);
  } else {
    const int64_t ld = o.k_major ? o.outer : o.k, at = o.k_major ? k.begin * ld + first : first * ld + k.begin;
    simd.pack(o.element, o.data + at, ld, o.k_major, n, k.length, width, panel);
  }
}

// Writes those rows' scales [blocks, width], one for each row and each block of `block` k, from block `begin` on.
inline void pack_scales(const Operand& o, int64_t first, int64_t n, int width, int64_t block, int64_t begin,
                        int64_t blocks, float* out) {
  for (int64_t b = begin; b < begin + blocks; ++b, out += width) {
    const int64_t j = o.block_k ? b * block / o.block_k : 0;
    if (!o.block_outer) {
      std::fill(out, out + n, o.scale(0, j));
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
    std::fill(out + n, out + width, 0.0f);
  }
}

}  // namespace diptych::cpu
