// r = alpha * acc; r = r + bias; r = r + beta * C; one cast (NUMERICS 7). Each operation rounds; none is contracted to
// a fused multiply-add. Amaxes of two-level operands enter alpha, which then differs from row to row or from column to
// column.
#pragma once

#include "cuda/base/scale.cuh"
#include "cuda/base/vector.cuh"
#include "diptych/gemm.h"

namespace diptych::cuda {

// A two-level operand's amax: one for each outer index, or (step 0) one for all; null for other formats.
struct Amax {
  const float* at = nullptr;
  int64_t step = 0;
};

inline Amax operand_amax(const QuantizedView& q) {
  if (row(q.format).rule != ScaleRule::two_level) return {};
  return {q.amax.as<const float>(), q.amax.numel() == 1 ? 0 : 1};
}

struct Epilogue {
  void* d;              // [m, n]
  const void* c;        // [m, n] of d's dtype, may be d itself; read only where beta != 0
  const void* bias;     // [n], or null
  int64_t m, n, pitch;  // pitch: elements from one row of d and c to the next
  float alpha, beta;
  Amax a_amax, b_amax;
  DType d_type, bias_type;
  bool vec;  // pairs of columns may be stored at once: n is even and d is aligned to two elements
};

inline Epilogue make_epilogue(const GemmArgs& args) {
  Epilogue e{};
  e.d = args.d.data, e.c = args.c.data, e.bias = args.bias.given() ? args.bias.data : nullptr;
  e.m = args.d.rows(), e.n = e.pitch = args.d.cols(), e.alpha = args.alpha, e.beta = args.beta;
  e.a_amax = operand_amax(args.a), e.b_amax = operand_amax(args.b);
  e.d_type = args.d.dtype, e.bias_type = args.bias.dtype;
  e.vec = e.n % 2 == 0 && reinterpret_cast<uintptr_t>(e.d) % (2 * bytes(e.d_type)) == 0;
  return e;
}

__device__ __forceinline__ float load_as_float(const void* p, DType type, int64_t i) {
  if (type == DType::f32) return static_cast<const float*>(p)[i];
  if (type == DType::f16) return to_float(static_cast<const __half*>(p)[i]);
  return to_float(static_cast<const __nv_bfloat16*>(p)[i]);
}

// row_alpha returns alpha * amax_a of a row that exists; full_alpha takes that as `of_row` and multiplies by a column's
// amax_b:
// ((alpha * amax_a) * amax_b) * a constant.
__device__ __forceinline__ float row_alpha(const Epilogue& e, int64_t row) {
  return e.a_amax.at ? __fmul_rn(e.alpha, __ldg(e.a_amax.at + row * e.a_amax.step)) : e.alpha;
}
__device__ __forceinline__ float full_alpha(const Epilogue& e, float of_row, int64_t col) {
  if (!e.b_amax.at) return e.a_amax.at ? __fmul_rn(of_row, kPerAmax) : of_row;
  const float r = __fmul_rn(of_row, __ldg(e.b_amax.at + col * e.b_amax.step));
  return __fmul_rn(r, e.a_amax.at ? kPerAmaxPair : kPerAmax);
}

__device__ __forceinline__ float finish(const Epilogue& e, float alpha, float acc, float bias, int64_t at) {
  float r = __fmul_rn(alpha, acc);
  if (e.bias) r = __fadd_rn(r, bias);
  if (e.beta != 0.0f) r = __fadd_rn(r, __fmul_rn(e.beta, load_as_float(e.c, e.d_type, at)));
  return r;
}

__device__ __forceinline__ void store_from_float(const Epilogue& e, float r, int64_t at) {
  if (e.d_type == DType::f32) {
    static_cast<float*>(e.d)[at] = r;
  } else if (e.d_type == DType::f16) {
    static_cast<__half*>(e.d)[at] = from_float<__half>(r);
  } else {
    static_cast<__nv_bfloat16*>(e.d)[at] = from_float<__nv_bfloat16>(r);
  }
}

// Finishes and stores columns col and col + 1 (col even) of one row. bias0 and bias1 are those columns' biases, of_row
// is the row's row_alpha.
__device__ __forceinline__ void finish_pair(const Epilogue& e, int64_t row, int64_t col, float of_row, float acc0,
                                            float acc1, float bias0, float bias1) {
  if (row >= e.m || col >= e.n) return;
  const int64_t at = row * e.pitch + col;
  const float r0 = finish(e, full_alpha(e, of_row, col), acc0, bias0, at);
  if (!e.vec) {
    store_from_float(e, r0, at);
    if (col + 1 < e.n) {
      store_from_float(e, finish(e, full_alpha(e, of_row, col + 1), acc1, bias1, at + 1), at + 1);
    }
    return;
  }
  const float r1 = finish(e, full_alpha(e, of_row, col + 1), acc1, bias1, at + 1);
  if (e.d_type == DType::f32) {
    *reinterpret_cast<float2*>(static_cast<float*>(e.d) + at) = make_float2(r0, r1);
  } else {
    const uint32_t both = e.d_type == DType::f16 ? pack2<__half>(r0, r1) : pack2<__nv_bfloat16>(r0, r1);
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(e.d) + at) = both;
  }
}

}  // namespace diptych::cuda
