// One product of two operands on the CPU, bit by bit as NUMERICS 7 asks: what gemm does once and grouped_gemm for each
// group.
#pragma once

#include <algorithm>

#include "cpu/gemm/operand.h"
#include "diptych/status.h"

namespace diptych::cpu {

// D [m, n] = alpha * A @ B.T + bias + beta * C. A is `m` rows of a larger operand, and D and C are as many of their
// own: row i of all three is the i-th from `m0` on. Blocks of scales lie where they do in the whole operand.
struct Product {
  Operand a, b;
  int64_t m0, m, n;
  Part k;
  bool whole;     // one block: the scale waits for the epilogue
  int64_t block;  // along k
  void* d;
  const void* c;     // read where beta is not 0
  const void* bias;  // [n], or null
  DType d_type, bias_type;
  float alpha, beta;

  int64_t work() const { return std::max<int64_t>(k.length, 1) * n * (m + 16); }
};

inline constexpr int64_t kThreadedWork = 1 << 21;  // of one product, or of several: from here on threads pay

// The operands, with their whole reduced axis, and how its blocks nest. An error names `op`.
Status plan(const char* op, const QuantizedView& a, const QuantizedView& b, Product& p);

void multiply(const Product& p, bool threaded);

}  // namespace diptych::cpu
