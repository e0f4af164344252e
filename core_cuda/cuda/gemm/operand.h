// One operand of the products that decode to bfloat16: the layout of its copy, and where its scales are applied.
#pragma once

#include <bit>
#include <string>

#include "cuda/base/device.h"
#include "diptych/gemm.h"

namespace diptych::cuda {

constexpr int kTileOuter = 128, kTileK = 64;               // tile of emulated products
constexpr int64_t kMostExtent = (int64_t{1} << 31) - 256;  // limit of each dimension, and of tiles

// Where a scale is applied: tensor in the epilogue, block on partial sums, e8m0 and e4m3 in the operand.
enum class ScaleKind : int { tensor, block, e8m0, e4m3 };

// The layout that a kernel is compiled for. either: the operand's fields decide at run time; else loads are vectors.
enum class Layout : int { outer_k, k_outer, either };

struct Operand {
  const uint8_t* data;  // [outer, k], or [k, outer] if k_major; E2M1: [outer, k / 2]
  const void* scale;
  int outer, k;
  int64_t scale_stride_outer, scale_stride_k;  // elements between neighbouring blocks
  int outer_shift, k_shift;                    // log2 of the block's extents
  ScaleKind kind;
  DType element;
  bool k_major;
  bool vec;  // alignment permits one load of a fragment's 16 k (k_major: 8-byte loads of data and scales)
};

// Describes a copy as the operand [outer, k]. Returns an error for formats that bfloat16 cannot hold.
inline Status make_operand(const char* op, const QuantizedView& q, int64_t outer, int64_t k, Operand* o) {
  const FormatRow& f = row(q.format);
  const auto unsupported = [&](const char* what) {
    return Status(Code::unsupported, std::string(op) + ": no CUDA kernel for " + what + " of format " + f.name);
  };
  const bool e2m1 = f.element == DType::e2m1;
  if (f.element != DType::e4m3 && f.element != DType::e5m2 && !e2m1) return unsupported("the elements");
  // Only E2M1 times E4M3 is exact in bfloat16.
  const bool known = e2m1 ? f.scale == DType::e4m3 : f.scale == DType::f32 || f.scale == DType::e8m0;
  if (!known) return unsupported("the scales");
  *o = {};
  o->data = q.data.as<const uint8_t>(), o->scale = q.scale_inv.data, o->outer = static_cast<int>(outer),
  o->k = static_cast<int>(k);
  o->element = f.element;
  o->k_major = q.columnwise && f.columnwise == ColumnwiseLayout::row_major;
  o->kind = f.scale == DType::e8m0   ? ScaleKind::e8m0
            : f.scale == DType::e4m3 ? ScaleKind::e4m3
            : f.one_scale()          ? ScaleKind::tensor
                                     : ScaleKind::block;
  const unsigned block_outer = f.one_scale() ? 1 : f.block_rows, block_k = f.one_scale() ? 1 : f.block_cols;
  // A fragment (16 k, or 8 outer x 4 k) and a tile of 64 k must not straddle the blocks whose scale they take.
  const bool fits = f.one_scale() || (std::has_single_bit(block_outer) && std::has_single_bit(block_k) &&
                                      block_k % (o->kind == ScaleKind::block ? kTileK : 16) == 0);
  if (!fits || (f.one_scale() && o->kind != ScaleKind::tensor)) return unsupported("the blocks");
  if (e2m1 && (o->k_major || k % 16 != 0)) return unsupported("the layout");
  o->outer_shift = std::countr_zero(block_outer), o->k_shift = std::countr_zero(block_k);
  o->scale_stride_outer = o->k_major ? 1 : ceil_div(k, block_k);
  o->scale_stride_k = o->k_major ? ceil_div(outer, block_outer) : 1;
  o->vec = o->k_major ? outer % 8 == 0 && aligned(o->data, 8) && aligned(o->scale, 8) && block_outer == 1
                      : k % 16 == 0 && aligned(o->data, 16 / f.pack());
  return {};
}

}  // namespace diptych::cuda
