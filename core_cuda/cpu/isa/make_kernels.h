// The table of an instruction set's inner loops, made of all simd_*.h.
#pragma once

#include "cpu/isa/isa.h"
#include "cpu/isa/simd_gemm.h"
#include "cpu/isa/simd_hash.h"
#include "cpu/isa/simd_quantize.h"
#include "cpu/isa/simd_source.h"
#include "cpu/isa/simd_statistics.h"
#include "cpu/isa/simd_two_level.h"
#include "cpu/quantize/e2m1.h"

namespace diptych::cpu {
inline namespace DIPTYCH_ISA {

inline constexpr Kernels make_kernels(const char* name) {
  return {.name = name,
          .amax = amax,
          .load = load_f32,
          .column_amax = column_amax,
          .segment_amax = segment_amax,
          .scales = scales,
          .encode = encode_row,
          .decode = decode_row,
          .shift_bytes = shift_bytes,
          .row_peaks = row_peaks,
          .column_peaks = column_peaks,
          .two_level_scales = two_level_scales,
          .encode_rows = encode_rows,
          .encode_columns = encode_columns,
          .rotate = rotate,
          .unpack = unpack,
          .gather = gather,
          .transpose = transpose,
          .hash = hash_blocks,
          .statistics = add_rows,
          .column_sum = column_sum,
          .sum_rows = sum_rows,
          .store = store_f32,
          .fused = fused_kernels(),
          .mr = kRows,
          .a_width = kWidthA,
          .nr = kCols,
          .pack = pack,
          .tile = tile,
          .tile_blocked = tile_blocked,
          .epilogue = epilogue};
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych::cpu
