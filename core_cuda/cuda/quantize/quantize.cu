// Helpers of the quantize kernels, and the rows of the kernel table that run several kernels.
#include <algorithm>
#include <limits>

#include "cuda/base/amax.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/vector.cuh"
#include "cuda/quantize/many.cuh"
#include "cuda/quantize/quantize.h"
#include "cuda/source/column_sum.cuh"

namespace diptych::cuda {

DivideRule divide_rule(const QuantizeArgs& args) {
  const FormatRow& f = row(args.spec.format);
  // Per-tensor scaling overflows to FLT_MAX, block scaling to the input dtype's largest finite value (NUMERICS 2).
  const float value_for_inf = f.one_scale() ? std::numeric_limits<float>::max() : row(args.x.dtype).max;
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

// Sets `amax` to what the kernels expect: the tensor's amax, or 0 if they join it while they encode.
Status prepare_amax(const QuantizeArgs& args, const Execution& exec) {
  if (args.amax_mode != AmaxMode::compute) return {};
  if (!args.scale.given()) {
    return cuda::amax({.x = args.x, .out = args.amax, .columnwise_out = {}, .source = args.source}, exec);
  }
  return clear_amax(args.amax, exec);
}

}  // namespace

Status prepare_quantize(const QuantizeArgs& args, const Execution& exec) {
  if (args.column_sum.given()) {
    DIPTYCH_TRY(column_sums(args.x, args.source, args.column_sum, args.workspace, exec));
  }
  return row(args.spec.format).one_scale() ? prepare_amax(args, exec) : Status();
}

namespace {

QuantizeArgs rows_of(const QuantizeArgs& args) {
  QuantizeArgs rows = args;
  rows.columnwise = {}, rows.column_sum = {};
  return rows;
}

}  // namespace

bool quantize_permuted_split_fits(const QuantizeArgs& args) {
  const bool block = !row(args.spec.format).one_scale();
  return block && args.rowwise.given() && args.columnwise.given() && quantize_permuted_rows_fits(rows_of(args));
}

Status quantize_permuted_split(const QuantizeArgs& args, const Execution& exec) {
  DIPTYCH_TRY(quantize_permuted_rows(rows_of(args), exec));
  QuantizeArgs columns = args;
  columns.rowwise = {}, columns.column_sum = {}, columns.workspace = {};
  return diptych::quantize(columns, exec);  // with the first row of the kernel table that fits
}

bool quantize_stack_fits(const QuantizeStackArgs& args) {
  return args.stack.x.numel() > 0;
}  // an empty one's scale is 1

constexpr int64_t kStaysInL2 = 32 << 20;  // bytes of x that a second pass still finds in L2

Status quantize_stack(const QuantizeStackArgs& of, const Execution& exec) {
  const QuantizeArgs& args = of.stack;
  const int64_t count = args.x.shape[0];
  const bool computes = row(args.spec.format).one_scale() && args.amax_mode == AmaxMode::compute;
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

bool quantize_many_fits(const QuantizeManyArgs& args) {
  return std::all_of(args.each.begin(), args.each.end(), [](const QuantizeArgs& one) { return one.x.numel() > 0; });
}

Status quantize_many(const QuantizeManyArgs& args, const Execution& exec) {
  const std::span<const QuantizeArgs> calls = args.each;
  const FormatRow& f = row(calls.front().spec.format);
  if (f.rule == ScaleRule::e8m0_ceil) return mxfp8_many(calls, exec);
  const bool computes = f.one_scale() && calls.front().amax_mode == AmaxMode::compute;
  if (!computes || calls.front().scale.given()) {
    if (computes) DIPTYCH_TRY(clear_amaxes(calls, exec));
    return tile_many(calls, exec);
  }
  for (size_t begin = 0, end = 0; begin < calls.size(); begin = end) {
    int64_t read = 0;
    do {
      read += calls[end].x.numel() * bytes(calls[end].x.dtype);
    } while (++end < calls.size() && read + calls[end].x.numel() * bytes(calls[end].x.dtype) <= kStaysInL2);
    DIPTYCH_TRY(amax_many(calls.subspan(begin, end - begin), exec));
    DIPTYCH_TRY(tile_many(calls.subspan(begin, end - begin), exec));
  }
  return {};
}

}  // namespace diptych::cuda
