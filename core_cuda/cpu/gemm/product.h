// One product of two operands on the CPU, with the bits that NUMERICS 7 defines. gemm computes one, grouped_gemm one
// for each group.
#pragma once

#include <algorithm>

#include "cpu/gemm/operand.h"
#include "diptych/status.h"

namespace diptych::cpu {

// D [m, n] = alpha * A @ B.T + bias + beta * C. The product takes rows m0 .. m0 + m - 1 of A, D and C, which may have
// more. Blocks of scales are placed as in the whole operand.
struct Product {
  Operand a, b;
  int64_t m0, m, n;
  Part k;
  bool whole;     // one block: its scale is applied in the epilogue
  int64_t block;  // along k
  void* d;
  const void* c;     // read where beta is not 0
  const void* bias;  // [n], or null
  DType d_type, bias_type;
  float alpha, beta;

  int64_t work() const { return std::max<int64_t>(k.length, 1) * n * (m + 16); }
};

// The least work, of one product or of several together, for which waking threads pays.
inline constexpr int64_t kThreadedWork = 1 << 21;

// Sets p's operands, reduced axis and blocks. Returns an error that names `op` if the blocks do not nest or an element
// is not supported.
Status plan(const char* op, const QuantizedView& a, const QuantizedView& b, Product& p);

void multiply(const Product& p, bool threaded);

}  // namespace diptych::cpu
