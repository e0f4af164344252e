// What an op encodes: x itself, its rows in another order, or float32 values that are computed from it as they are
// asked for.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/isa/isa.h"
#include "diptych/ops.h"

namespace diptych::cpu {

// A vector of parameters as float32
std::vector<float> as_floats(const Kernels&, const TensorView&);
// What normalized values are multiplied by: gamma or 1 + gamma
std::vector<float> gamma_of(const Kernels&, const TensorView& gamma, bool zero_centered);

class Input {
 public:
  Input(const TensorView& x, const Source& source);

  int64_t m, k;  // of what is encoded
  DType dtype;   // of the elements that `stage` leaves
  bool staged;   // else `x` itself may be read in place, [m, k] of `dtype`
  const TensorView& x;

  // Rows r0 .. r0 + rows, columns c0 .. c0 + cols into memory with rows of ld elements
  void stage(int64_t r0, int64_t rows, int64_t c0, int64_t cols, char* to, int64_t ld) const;

  // Of permuted rows: for each row of x whether it is among them. Empty: all are.
  std::vector<char> used() const;

 private:
  void compute(int64_t r, int64_t c0, int64_t cols, float* to) const;
  int64_t origin(int64_t r) const;  // of a permuted row: a row of x, or -1

  const Kernels& simd_;
  const Source& source_;
  std::vector<float> g_, beta_;
};

// out[c] = sum over rows of what is encoded (kSumChunk)
void column_sums(const Input&, const TensorView& out);

// 16 staged rows of float32 as the bfloat16 that the Hadamard transform takes
void round_band(const Kernels&, const float* band, int64_t ld, int64_t cols, char* to);

}  // namespace diptych::cpu
