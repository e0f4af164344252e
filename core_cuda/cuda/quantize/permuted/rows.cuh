// Rowwise copies of permuted rows: what their kernels share.
#pragma once

#include "cuda/permute/origin.cuh"
#include "cuda/permute/rows.cuh"
#include "cuda/quantize/quantize.h"
#include "cuda/source/elements.cuh"

namespace diptych::cuda {

enum class Blocks { tensor, vector, mx };  // one scale, 1x128 float32, 1x32 E8M0
template <Blocks kBlocks>
constexpr int kWidth = kBlocks == Blocks::mx ? 32 : 128;

struct RowParams {
  Elements x;
  int64_t tokens, k;
  const int* row_id_map;
  int slots;
  AbsentRows absent;
  uint8_t* out;
  RowBytes zeros;    // the same, of rows without a token
  void* scale;       // [1], or [rows, blocks]
  int64_t blocks;    // of a row
  TensorScale from;  // Blocks::tensor
  DivideRule rule;
  float max_reciprocal;                    // Blocks::mx
  bool vec_x, vec_out, vec_out16, words;   // aligned to 16, 8, 16 and (scales) 4 bytes, and so are their rows
  float *amax = nullptr, *also = nullptr;  // amax_kernel: either may be null
};

// Whether rows can be taken in pieces, a warp each: 16 bits an element, in whole vectors. Scales of their own alone.
bool row_pieces_fit(const RowParams&);
Status quantize_row_pieces(const RowParams&, Blocks, DType element, const Execution&);

}  // namespace diptych::cuda
