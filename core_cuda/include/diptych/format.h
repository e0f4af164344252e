// The format table: each property of a format that a kernel may use is a column here.
#pragma once

#include <cstdint>

#include "diptych/dtype.h"

namespace diptych {

// How a block's scale is computed from its amax (NUMERICS 2-5).
enum class ScaleRule : int32_t {
  divide,     // scale = max / amax in float32, stored as its reciprocal; optionally floored to a power of two
  e8m0_ceil,  // scale_inv = amax / max rounded up to a power of two, stored as E8M0
  two_level,  // E4M3 scale relative to an amax of the whole tensor (or of a row), which is stored with the copy
};

// How the columnwise copy of an [M, K] tensor is laid out.
enum class ColumnwiseLayout : int32_t {
  transposed,  // data [K, M]; scales in the same orientation
  row_major,   // data [M, K]; only the scales' blocks run along M
};

enum class FormatId : int32_t {};  // an index into the table

// The extents of a block; 0 stands for the tensor's whole extent.
struct Block {
  int32_t rows, cols;
};

struct FormatRow {
  const char* name;
  DType element;
  DType scale;
  int32_t block_rows;  // a rowwise block is block_rows x block_cols elements; 0: the tensor's whole extent
  int32_t block_cols;
  ScaleRule rule;
  ColumnwiseLayout columnwise;
  float
      tolerance;  // relative error of one quantize-dequantize round trip of a normal value: half an ulp of the element

  constexpr bool one_scale() const { return block_rows == 0 && block_cols == 0; }
  // The block of one copy, in the tensor's orientation.
  constexpr Block block(bool columnwise_copy) const {
    return columnwise_copy ? Block{block_cols, block_rows} : Block{block_rows, block_cols};
  }
  constexpr int32_t pack() const { return element == DType::e2m1 ? 2 : 1; }              // elements in a byte
  constexpr DType data() const { return element == DType::e2m1 ? DType::u8 : element; }  // dtype of the payload
  // Whether a tensor may end inside a block: packed formats take whole blocks only.
  constexpr bool ragged() const { return pack() == 1; }
};

// clang-format off
inline constexpr FormatRow kFormats[] = {
    // name                  element      scale        block      rule                  columnwise                    tolerance
    {"fp8_e4m3_tensor",      DType::e4m3, DType::f32,    0,   0, ScaleRule::divide,    ColumnwiseLayout::transposed, 0.0625f},
    {"fp8_e5m2_tensor",      DType::e5m2, DType::f32,    0,   0, ScaleRule::divide,    ColumnwiseLayout::transposed, 0.125f },
    {"fp8_e4m3_1x128",       DType::e4m3, DType::f32,    1, 128, ScaleRule::divide,    ColumnwiseLayout::transposed, 0.0625f},
    {"fp8_e5m2_1x128",       DType::e5m2, DType::f32,    1, 128, ScaleRule::divide,    ColumnwiseLayout::transposed, 0.125f },
    {"fp8_e4m3_128x128",     DType::e4m3, DType::f32,  128, 128, ScaleRule::divide,    ColumnwiseLayout::transposed, 0.0625f},
    {"fp8_e5m2_128x128",     DType::e5m2, DType::f32,  128, 128, ScaleRule::divide,    ColumnwiseLayout::transposed, 0.125f },
    {"mxfp8_e4m3",           DType::e4m3, DType::e8m0,   1,  32, ScaleRule::e8m0_ceil, ColumnwiseLayout::row_major,  0.0625f},
    {"mxfp8_e5m2",           DType::e5m2, DType::e8m0,   1,  32, ScaleRule::e8m0_ceil, ColumnwiseLayout::row_major,  0.125f },
    {"nvfp4",                DType::e2m1, DType::e4m3,   1,  16, ScaleRule::two_level, ColumnwiseLayout::transposed, 0.25f  },
};
// clang-format on
inline constexpr int32_t kFormatCount = sizeof(kFormats) / sizeof(kFormats[0]);

constexpr bool valid(FormatId id) { return static_cast<int32_t>(id) >= 0 && static_cast<int32_t>(id) < kFormatCount; }
constexpr const FormatRow& row(FormatId id) { return kFormats[static_cast<int32_t>(id)]; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// The number of blocks along an extent. A block of the whole extent exists even if the extent is 0.
constexpr int64_t block_count(int64_t extent, int32_t block) { return block == 0 ? 1 : ceil_div(extent, block); }

// The shape of the scales of one copy of an [m, k] tensor, in the orientation of that copy's data.
struct ScaleShape {
  int64_t rows, cols;
};
constexpr ScaleShape scale_shape(const FormatRow& f, bool columnwise, int64_t m, int64_t k) {
  const Block block = f.block(columnwise);
  const int64_t down = block_count(m, block.rows), across = block_count(k, block.cols);
  const bool turned = columnwise && f.columnwise == ColumnwiseLayout::transposed;
  return turned ? ScaleShape{across, down} : ScaleShape{down, across};
}

}  // namespace diptych
