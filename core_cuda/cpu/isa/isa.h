// What an instruction set provides: the inner loops, all with identical bits, behind one table of functions.
// They run inside an IeeeScope, take plain pointers, and never allocate.
#pragma once

#include <cstdint>

#include "cpu/isa/source_kernels.h"
#include "diptych/format.h"

namespace diptych::cpu {

struct ScaleParams {
  ScaleRule rule;
  float max;  // largest finite value of the element
  float eps;
  bool pow2;
  float value_for_inf;  // NUMERICS 2
};

// Two-level formats: a block's scale is its amax times `up`; its values are divided by scale times `down` (NUMERICS 5).
struct Level {
  float up, down;
};

// FP8 bytes times a power of two: the magnitude minus `down` from `normal` on, below it the number of `reaches` that it
// is not less than; from `nan` on a NaN.
struct ByteShift {
  uint8_t down, normal, nan, reaches[8];
};

// The random bytes of stochastic rounding: block i of a run draws from counter first + i * step.
struct Draws {
  uint32_t key[2];
  uint64_t offset, first, step;
};

// Finishes one strip of an output row: r = alpha * acc + bias + beta * c, every operation rounded, one cast.
struct Epilogue {
  float alpha, beta;
  const float* amax;  // null: none; else column j's alpha is (alpha * amax[j]) * unit
  float unit;
  const float* bias;  // null: none
  const float* sb;    // not null: acc covers all of K and is first multiplied by sa * sb
  float sa;
  const void* c;  // null: none
  void* d;
  DType dtype;
};

struct LaneMoments;

struct Kernels {
  const char* name;

  // max over finite |x|, or 0 if no element is finite; column_amax and segment_amax do the same
  float (*amax)(DType, const void* x, int64_t n);
  void (*load)(DType, const void* x, int64_t n, float* out);
  // out[c] = max over rows of |x[., c]|
  void (*column_amax)(DType, const void* x, int64_t ld, int64_t rows, int64_t cols, float* out);
  // out[j] = max over x[j * segment ...] of |x|, the last segment ragged
  void (*segment_amax)(DType, const void* x, int64_t n, int64_t segment, float* out);
  // each block's amax -> the multiplier of its values, and the stored scale: inv (divide) or code (e8m0_ceil)
  void (*scales)(const ScaleParams&, const float* amax, int64_t n, float* multiplier, float* inv, uint8_t* code);
  // element i is multiplied by multiplier[i / width] or scale_inv[i / width]. `bounded`: each multiplier was computed
  // from the amax of its values; else there is one multiplier for all n, of any value
  void (*encode)(DType element, DType, const void* x, const float* multiplier, bool bounded, int64_t width, int64_t n,
                 uint8_t* out);
  void (*decode)(DType element, const uint8_t* q, const float* scale_inv, int64_t width, int64_t n, DType, void* out);
  void (*shift_bytes)(const ByteShift&, int64_t n, uint8_t* bytes);
  // two-level formats, in blocks of 16: the largest magnitude of each block, along a row of n or down 16 rows; infinite
  // or NaN if the block has such an element
  void (*row_peaks)(DType, const void* x, int64_t n, float* out);
  void (*column_peaks)(DType, const void* x, int64_t ld, int64_t cols, float* out);
  void (*two_level_scales)(const Level&, const float* peaks, int64_t n, float* multiplier, uint8_t* code);
  // one multiplier per block; draws null: rounds to nearest. encode_columns: the 16 elements of column c go to out[c *
  // ld_out]
  void (*encode_rows)(DType, const void* x, const float* multiplier, int64_t n, const Draws*, uint8_t* out);
  void (*encode_columns)(DType, const void* x, int64_t ld, int64_t cols, const float* multiplier, const Draws*,
                         uint64_t* out, int64_t ld_out);
  // the Hadamard transform of 16 rows of bfloat16
  void (*rotate)(const void* x, int64_t ld, int64_t cols, bool signs, float* out, int64_t ld_out);
  // n packed E2M1 elements -> E4M3 codes of the same values
  void (*unpack)(const uint8_t* src, int64_t n, uint8_t* dst);
  // dst [rows, ld_dst] = src [rows, ld_src], with prefetches of source rows
  void (*gather)(const char* src, int64_t ld_src, int64_t rows, int64_t bytes, char* dst, int64_t ld_dst);
  // dst [cols, rows] = src [rows, cols].T
  void (*transpose)(const uint8_t* src, int64_t ld_src, int64_t rows, int64_t cols, uint8_t* dst, int64_t ld_dst);
  // adds the blocks from x on, of which the first has number `first`, to the two sums of hash
  void (*hash)(const uint8_t* x, int64_t first, int64_t count, uint64_t* sums);
  // adds rows of 256 elements to the sums and counts of statistics
  void (*statistics)(const float* x, int64_t rows, int32_t smallest_normal, LaneMoments*);
  // acc[c] = acc[c] + x[r, c] for ascending r
  void (*column_sum)(DType, const void* x, int64_t ld, int64_t rows, int64_t cols, float* acc);
  // out[i] = ((+0 + by[0] * rows[0][i]) + by[1] * rows[1][i]) + ..., every operation rounded, one cast
  void (*sum_rows)(DType, const void* const* rows, const float* by, int64_t count, int64_t n, void* out);
  void (*store)(DType, const float* x, int64_t n, void* out);
  FusedKernels fused;

  // gemm: a micro-tile is mr x nr, packed operands are panels [k, width] with width a_width (>= mr) and nr
  int mr, a_width, nr;
  // k_major: src is [k, ld], else [outer, ld]; columns past `outer` become zero
  void (*pack)(DType element, const uint8_t* src, int64_t ld, bool k_major, int64_t outer, int64_t k, int width,
               float* dst);
  // p = fma(a, b, p) over k; p [rows, nr] is read and written
  void (*tile)(int rows, const float* a, const float* b, int64_t k, float* p);
  // for every k_block: p = +0; p = fma(a, b, p); acc = acc + p * (sa * sb). sa, sb: [blocks, width]
  void (*tile_blocked)(int rows, const float* a, const float* b, int64_t k, int64_t k_block, const float* sa,
                       const float* sb, float* acc);
  void (*epilogue)(const Epilogue&, const float* acc, int64_t n);
};

const Kernels& kernels();  // the kernels of the instruction set in use

const Kernels* avx512_kernels();  // null on other processors than x86-64
const Kernels* avx2_kernels();
const Kernels* generic_kernels();

}  // namespace diptych::cpu
