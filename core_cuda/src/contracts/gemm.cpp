// Contracts of products and of the bias gradient.
#include <cmath>

#include "contracts/parts.h"

namespace diptych {

using namespace contract;

static Status finite(const char* op, const char* name, float value) {
  if (std::isfinite(value)) return {};
  return {Code::value, std::string(op) + ": " + name + " must be finite, got " + std::to_string(value)};
}

Status contract::same_depth(const char* op, const QuantizedView& a, const QuantizedView& b) {
  const int64_t of_a = extents(a).reduced, of_b = extents(b).reduced;
  if (of_a == of_b) return {};
  return {Code::shape, std::string(op) + ": a (" + row(a.format).name + ") reduces over " + std::to_string(of_a) +
                           " elements, b (" + row(b.format).name + ") over " + std::to_string(of_b) + "; a is " +
                           describe(a.data) + ", b " + describe(b.data)};
}

Status contract::result(const char* op, const TensorView& d, const TensorView& c, int64_t rows, int64_t cols,
                        float alpha, float beta, const Device& device) {
  DIPTYCH_TRY(present(op, "d", d, device));
  DIPTYCH_TRY(high_precision(op, "d", d));
  DIPTYCH_TRY(of_shape(op, "d", d, rows, cols));
  DIPTYCH_TRY(finite(op, "alpha", alpha));
  DIPTYCH_TRY(finite(op, "beta", beta));
  if (beta != 0.0f && !c.given()) return {Code::value, std::string(op) + ": beta is not 0 and no c was given"};
  if (!c.given()) return {};
  DIPTYCH_TRY(present(op, "c", c, device));
  DIPTYCH_TRY(of_dtype(op, "c", c, d.dtype));
  DIPTYCH_TRY(of_shape(op, "c", c, rows, cols));
  return c.data == d.data ? Status() : apart(op, "d", d, "c", c);
}

Status contract::options(const char* op, const GemmOptions& options, const QuantizedView& a, const QuantizedView& b) {
  if (!options.fast_accum || (row(a.format).one_scale() && row(b.format).one_scale())) return {};
  return {Code::value, std::string(op) + ": fast_accum exists for per-tensor FP8 only, got " + row(a.format).name +
                           " x " + row(b.format).name};
}

Status check(const GemmArgs& a, const Device& device) {
  constexpr const char* op = "gemm";
  DIPTYCH_TRY(lone_copy(op, "a", a.a, device));
  DIPTYCH_TRY(lone_copy(op, "b", a.b, device));
  const Extents ea = extents(a.a), eb = extents(a.b);
  DIPTYCH_TRY(same_depth(op, a.a, a.b));
  DIPTYCH_TRY(result(op, a.d, a.c, ea.kept, eb.kept, a.alpha, a.beta, device));
  if (a.bias.given()) {
    DIPTYCH_TRY(present(op, "bias", a.bias, device));
    DIPTYCH_TRY(high_precision(op, "bias", a.bias));
    DIPTYCH_TRY(of_numel(op, "bias", a.bias, eb.kept));
  }
  DIPTYCH_TRY(options(op, a.options, a.a, a.b));
  DIPTYCH_TRY(workspace(
      op, a.workspace,
      gemm_workspace_bytes(a.a.format, a.b.format, ea.kept, eb.kept, ea.reduced, a.bias.given() || a.beta != 0.0f),
      device, operands(a)));
  return all_apart(op, operands(a), "d", "another operand");
}

Status check(const BiasGradArgs& a, const Device& device) {
  constexpr const char* op = "bias_grad";
  DIPTYCH_TRY(present(op, "dy", a.dy, device));
  DIPTYCH_TRY(high_precision(op, "dy", a.dy));
  DIPTYCH_TRY(ranked(op, "dy", a.dy));
  DIPTYCH_TRY(present(op, "out", a.out, device));
  DIPTYCH_TRY(high_precision(op, "out", a.out));
  DIPTYCH_TRY(of_numel(op, "out", a.out, a.dy.cols()));
  DIPTYCH_TRY(workspace(op, a.workspace, bias_grad_workspace_bytes(a.dy.rows(), a.dy.cols()), device, operands(a)));
  return apart(op, "out", a.out, "dy", a.dy);
}

}  // namespace diptych
