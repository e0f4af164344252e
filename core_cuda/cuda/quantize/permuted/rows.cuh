// The parameters of the kernels for rowwise copies of permuted rows.
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
  RowBytes zeros;    // out as rows of zeros, for absent rows
  void* scale;       // [1], or [rows, blocks]
  int64_t blocks;    // blocks of a row
  TensorScale from;  // Blocks::tensor
  DivideRule rule;
  float max_reciprocal;                    // Blocks::mx
  bool vec_x, vec_out, vec_out16, words;   // x, out, out and scales, with rows, are aligned to 16, 8, 16 and 4 bytes
  float *amax = nullptr, *also = nullptr;  // permuted_amax_kernel: either may be null
};

// Returns whether warps can take rows in pieces: 16-bit elements, in whole vectors. Only for block formats.
bool row_pieces_fit(const RowParams&);
Status quantize_row_pieces(const RowParams&, Blocks, DType element, const Execution&);

}  // namespace diptych::cuda
