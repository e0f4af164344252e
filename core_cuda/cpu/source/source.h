// The input that an op encodes: x itself, its rows in another order, or float32 values that are computed from x on
// demand.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/isa/isa.h"
#include "diptych/quantize.h"

namespace diptych::cpu {

// Returns a vector of parameters as float32; empty if the tensor is absent.
std::vector<float> as_floats(const Kernels&, const TensorView&);
// Returns the factor of normalized values: gamma, or 1 + gamma.
std::vector<float> gamma_of(const Kernels&, const TensorView& gamma, bool zero_centered);

class Input {
 public:
  Input(const TensorView& x, const Source& source);

  int64_t m, k;  // extents of the encoded tensor
  DType dtype;   // dtype of the elements that `stage` writes
  bool staged;   // if false, `x` may be read in place as [m, k] of `dtype`
  const TensorView& x;

  // Writes rows [r0, r0 + rows) and columns [c0, c0 + cols) to memory with rows of ld elements.
  void stage(int64_t r0, int64_t rows, int64_t c0, int64_t cols, char* to, int64_t ld) const;

  // For permuted rows, returns for each row of x whether it is used. Empty: all rows are.
  std::vector<char> used() const;

 private:
  void compute(int64_t r, int64_t c0, int64_t cols, float* to) const;
  int64_t origin(int64_t r) const;  // the row of x that permuted row r comes from, or -1

  const Kernels& simd_;
  const Source& source_;
  std::vector<float> g_, beta_;
};

// out[c] = sum over the encoded rows (kSumChunk)
void column_sums(const Input&, const TensorView& out);

// Converts 16 staged rows of float32 to bfloat16, which the Hadamard transform takes.
void round_band(const Kernels&, const float* band, int64_t ld, int64_t cols, char* to);

}  // namespace diptych::cpu
