// Chooses the kernel, and the simplest of them: per-tensor scaling of a rowwise copy, a stream of elements.
#include <algorithm>
#include <limits>

#include "cuda/base/amax.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/vector.cuh"
#include "cuda/quantize/quantize.h"
#include "cuda/source/column_sum.cuh"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 256, kUnroll = 4;

// q[i] = cast(x[i] * scale), NaN where x[i] is infinite. `vec`: x is 16-byte aligned and q as its vectors' bytes are.
template <typename T, bool kE5M2>
__global__ void __launch_bounds__(kThreads)
    stream_kernel(const T* __restrict__ x, int64_t n, TensorScale from, uint8_t* __restrict__ q,
                  float* __restrict__ scale_inv, DivideRule rule, bool vec) {
  constexpr int kN = Vec<T>::kCount;
  constexpr int64_t kPerBlock = static_cast<int64_t>(kThreads) * kUnroll * kN;
  const float scale = from.scale ? *from.scale : scale_from_amax(rule, *from.amax);
  float m = 0.0f;
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = reciprocal_rn(scale);

  // Last blocks first: the end of x is what the amax pass has just left in L2.
  const int64_t begin = static_cast<int64_t>(gridDim.x - 1 - blockIdx.x) * kPerBlock;
  if (vec && begin + kPerBlock <= n) {
    const int64_t first = begin + static_cast<int64_t>(threadIdx.x) * kN;
    Vec<T> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = Vec<T>::load(x + first + u * kThreads * kN);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      v[u] = without_inf(v[u]);
      if (from.join) m = max_abs(m, v[u]);
      float y[kN];
#pragma unroll
      for (int i = 0; i < kN; ++i) y[i] = multiply_rn(v[u][i], scale);
      uint8_t* p = q + first + u * kThreads * kN;
      const uint32_t lo = encode4<kE5M2>(y[0], y[1], y[2], y[3]);
      if constexpr (kN == 4) {
        *reinterpret_cast<uint32_t*>(p) = lo;
      } else {
        *reinterpret_cast<uint2*>(p) = make_uint2(lo, encode4<kE5M2>(y[4], y[5], y[6], y[7]));
      }
    }
  } else {
    const int64_t end = begin + kPerBlock < n ? begin + kPerBlock : n;
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
      const float v = without_inf(to_float(x[i]));
      m = max_abs(m, v);
      q[i] = encode<kE5M2>(multiply_rn(v, scale));
    }
  }
  __shared__ float scratch[kThreads / 32];
  if (from.join) join_amax<kThreads>(m, scratch, from.join);
}

Status no_kernel(const FormatRow& f) {
  return {Code::unsupported, std::string("quantize: no CUDA kernel for format ") + f.name +
                                 "; CUDA has float32 scales per tensor, 1x128 and 128x128 and E4M3 scales 1x16 of E2M1 "
                                 "(columnwise copies transposed), and E8M0 scales 1x32 (columnwise copy row-major)"};
}

}  // namespace

DivideRule divide_rule(const QuantizeArgs& args) {
  const FormatRow& f = row(args.spec.format);
  // Per-tensor scaling overflows to FLT_MAX, block scaling to the input dtype's largest finite value (NUMERICS 2).
  const float value_for_inf = f.per_tensor() ? std::numeric_limits<float>::max() : row(args.x.dtype).max;
  // An empty tensor's scale is 1, whatever eps is (NUMERICS 6).
  const Extent e = encoded_extent(args.x, args.source);
  const bool empty = e.rows * e.cols == 0 && args.amax_mode == AmaxMode::compute;
  return {row(f.element).max, empty ? 0.0f : args.spec.eps, value_for_inf, args.spec.has(kPow2)};
}

TensorScale tensor_scale(const QuantizeArgs& args) {
  if (!args.scale.given()) return {.amax = args.amax.as<const float>()};
  return {.scale = args.scale.as<const float>(), .join = args.amax.as<float>()};
}

namespace {

bool encoded_in_tiles(const FormatRow& f) {
  const bool block = f.block_cols == 128 && (f.block_rows == 1 || f.block_rows == 128);
  return f.scale == DType::f32 && f.columnwise == ColumnwiseLayout::transposed && (f.per_tensor() || block);
}

// Leaves in `amax` what tensor_scale's kernel expects there.
Status prepare_amax(const QuantizeArgs& args, const Execution& exec) {
  if (args.amax_mode != AmaxMode::compute) return {};
  if (!args.scale.given()) {
    return cuda::amax({.x = args.x, .out = args.amax, .columnwise_out = {}, .source = args.source}, exec);
  }
  return clear_amax(args.amax, exec);
}

}  // namespace

Status quantize(const QuantizeArgs& args, const Execution& exec) {
  const FormatRow& f = row(args.spec.format);
  if (args.column_sum.given()) {
    DIPTYCH_TRY(column_sums(args.x, args.source, args.column_sum, args.workspace, exec));
  }
  // Rows that are scaled alone are encoded once, however many there are of them; columns take tiles of permuted rows.
  if (permuted_rows_fit(args)) {
    if (f.per_tensor()) DIPTYCH_TRY(prepare_amax(args, exec));
    return quantize_permuted_rows(args, exec);
  }
  if (permuted_both_fits(args)) return permuted_both(args, exec);
  // Other copies with scales of their own: a kernel each.
  if (QuantizeArgs rows = args; !f.per_tensor() && args.rowwise.given()) {
    rows.columnwise = {};
    if (permuted_rows_fit(rows)) {
      DIPTYCH_TRY(quantize_permuted_rows(rows, exec));
      QuantizeArgs columns = args;
      columns.rowwise = {}, columns.column_sum = {};
      return cuda::quantize(columns, exec);
    }
  }
  const bool row_major = f.columnwise == ColumnwiseLayout::row_major;
  if (f.rule == ScaleRule::e8m0_ceil) {
    return f.block_rows == 1 && f.block_cols == 32 && row_major ? quantize_mxfp8(args, exec) : no_kernel(f);
  }
  if (f.rule == ScaleRule::two_level) {
    const bool known = f.element == DType::e2m1 && f.scale == DType::e4m3 && f.block_rows == 1 && f.block_cols == 16;
    return known && !row_major ? quantize_nvfp4(args, exec) : no_kernel(f);
  }
  if (!encoded_in_tiles(f)) return no_kernel(f);
  if (f.per_tensor()) {
    DIPTYCH_TRY(prepare_amax(args, exec));
    const bool tiles = args.columnwise.given() || args.source.kind != SourceKind::plain;
    return tiles ? quantize_tiles(args, exec) : quantize_stream(args, exec);
  }
  return quantize_tiles(args, exec);
}

bool quantize_stack_fits(const QuantizeArgs& args) {
  return encoded_in_tiles(row(args.spec.format)) && args.x.numel() > 0;  // an empty tensor's scale is a case of its own
}

Status quantize_stack(const QuantizeArgs& args, const Execution& exec) {
  constexpr int64_t kStaysInL2 = 32 << 20;  // bytes of x that a second pass finds there
  const int64_t count = args.x.shape[0];
  const bool computes = row(args.spec.format).per_tensor() && args.amax_mode == AmaxMode::compute;
  if (!computes || args.scale.given()) {
    if (computes) DIPTYCH_TRY(clear_amax(args.amax, exec));
    return quantize_tile_stack(args, exec);
  }
  const int64_t bytes_of_one = args.x.numel() / count * bytes(args.x.dtype);
  const int64_t together = std::max<int64_t>(1, kStaysInL2 / bytes_of_one);
  for (int64_t g = 0; g < count; g += together) {
    const QuantizeArgs some = slice(args, g, std::min(together, count - g));
    DIPTYCH_TRY(amax_stack(some.x, some.amax, exec));
    DIPTYCH_TRY(quantize_tile_stack(some, exec));
  }
  return {};
}

Status quantize_stream(const QuantizeArgs& args, const Execution& exec) {
  return with_float_type(args.x.dtype, "quantize", [&](auto type) {
    return with_element(row(args.spec.format).element, "quantize", [&](auto e5m2) {
      using T = decltype(type);
      constexpr int kN = Vec<T>::kCount;
      const T* x = args.x.as<const T>();
      uint8_t* q = args.rowwise.data.as<uint8_t>();
      const int64_t n = args.x.numel();
      const int64_t blocks = ceil_div(n, static_cast<int64_t>(kThreads) * kUnroll * kN);
      // One block at least: an empty tensor has a scale too.
      return launch("quantize", stream_kernel<T, e5m2.value>, blocks > 0 ? blocks : 1, kThreads, 0, exec.stream, x, n,
                    tensor_scale(args), q, args.rowwise.scale_inv.as<float>(), divide_rule(args),
                    aligned(x, 16) && aligned(q, kN));
    });
  });
}

}  // namespace diptych::cuda
