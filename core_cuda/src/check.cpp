#include "check.h"

#include <cmath>
#include <cstdint>

namespace diptych {
namespace {

std::string shape_text(const int64_t* shape, int rank) {
  std::string out = "[";
  for (int i = 0; i < rank; ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

std::string shape_text(std::initializer_list<int64_t> shape) {
  return shape_text(shape.begin(), static_cast<int>(shape.size()));
}

std::string device_text(const Device& d) {
  return d.backend == Backend::cpu ? "cpu" : "cuda:" + std::to_string(d.index);
}

// One argument's contract: present, on the op's device, dense, aligned to its element.
Status present(const char* op, const char* arg, const TensorView& t, const Device& device) {
  const std::string who = std::string(op) + ": " + arg;
  if (!t.given()) return {Code::type, who + " is missing"};
  if (t.device != device)
    return {Code::value, who + " is on " + device_text(t.device) + ", the other operands on " + device_text(device)};
  if (!t.contiguous) return {Code::value, who + " " + describe(t) + " is not contiguous; pass a contiguous copy"};
  if (t.numel() > 0 && t.data == nullptr) return {Code::value, who + " " + describe(t) + " has no memory"};
  if (reinterpret_cast<uintptr_t>(t.data) % bytes(t.dtype) != 0)
    return {Code::value, who + " " + describe(t) + " is not aligned to its element size"};
  return {};
}

Status high_precision(const char* op, const char* arg, const TensorView& t) {
  if (is_high_precision(t.dtype)) return {};
  return {Code::type, std::string(op) + ": " + arg + " must be float32, bfloat16 or float16, got " + describe(t)};
}

Status of_dtype(const char* op, const char* arg, const TensorView& t, DType dtype) {
  if (t.dtype == dtype) return {};
  return {Code::type, std::string(op) + ": " + arg + " must be " + name(dtype) + ", got " + describe(t)};
}

Status of_numel(const char* op, const char* arg, const TensorView& t, int64_t n) {
  if (t.numel() == n) return {};
  return {Code::value,
          std::string(op) + ": " + arg + " must hold " + std::to_string(n) + " elements, got " + describe(t)};
}

Status of_shape(const char* op, const char* arg, const TensorView& t, int64_t rows, int64_t cols) {
  if (t.rank >= 1 && t.rows() == rows && t.cols() == cols) return {};
  return {Code::value, std::string(op) + ": " + arg + " must be " + shape_text({rows, cols}) + ", got " + describe(t)};
}

Status ranked(const char* op, const char* arg, const TensorView& t) {
  if (t.rank >= 1) return {};
  return {Code::value, std::string(op) + ": " + arg + " must have at least one dimension, got a scalar"};
}

Status known(const char* op, FormatId id) {
  if (valid(id)) return {};
  return {Code::value, std::string(op) + ": unknown format id " + std::to_string(static_cast<int32_t>(id))};
}

// One copy of an [m, k] tensor against its format row.
Status copy(const char* op, const char* arg, const QuantizedView& q, int64_t m, int64_t k, const Device& device) {
  const FormatRow& f = row(q.format);
  const std::string data_name = std::string(arg) + " data (" + f.name + ")";
  const std::string scale_name = std::string(arg) + " scale_inv (" + f.name + ")";
  DIPTYCH_TRY(present(op, data_name.c_str(), q.data, device));
  DIPTYCH_TRY(of_dtype(op, data_name.c_str(), q.data, f.element));
  const bool flip = q.columnwise && f.columnwise == ColumnwiseLayout::transposed;
  DIPTYCH_TRY(of_shape(op, data_name.c_str(), q.data, flip ? k : m, flip ? m : k));
  DIPTYCH_TRY(present(op, scale_name.c_str(), q.scale_inv, device));
  DIPTYCH_TRY(of_dtype(op, scale_name.c_str(), q.scale_inv, f.scale));
  const ScaleShape s = scale_shape(f, q.columnwise, m, k);
  if (f.per_tensor()) return of_numel(op, scale_name.c_str(), q.scale_inv, 1);
  return of_shape(op, scale_name.c_str(), q.scale_inv, s.rows, s.cols);
}

// A copy that arrives alone: its tensor's extents follow from its own data.
Status lone_copy(const char* op, const char* arg, const QuantizedView& q, const Device& device) {
  DIPTYCH_TRY(known(op, q.format));
  const std::string data_name = std::string(arg) + " data (" + row(q.format).name + ")";
  DIPTYCH_TRY(present(op, data_name.c_str(), q.data, device));
  DIPTYCH_TRY(ranked(op, data_name.c_str(), q.data));
  const bool flip = q.columnwise && row(q.format).columnwise == ColumnwiseLayout::transposed;
  return copy(op, arg, q, flip ? q.data.cols() : q.data.rows(), flip ? q.data.rows() : q.data.cols(), device);
}

bool overlap(const TensorView& a, const TensorView& b) {
  const auto* a0 = a.as<const char>();
  const auto* b0 = b.as<const char>();
  return a.numel() > 0 && b.numel() > 0 && a0 < b0 + b.numel() * bytes(b.dtype) && b0 < a0 + a.numel() * bytes(a.dtype);
}

Status apart(const char* op, const char* out_name, const TensorView& out, const char* in_name, const TensorView& in) {
  if (!in.given() || !out.given() || !overlap(out, in)) return {};
  return {Code::value, std::string(op) + ": " + out_name + " overlaps " + in_name + " in memory"};
}

// Scratch memory: large enough, 16-byte aligned, and nobody else's.
Status workspace(const char* op, const TensorView& t, int64_t need, const Device& device,
                 std::initializer_list<const TensorView*> others) {
  if (device.backend == Backend::cpu || need == 0) return {};
  DIPTYCH_TRY(present(op, "workspace", t, device));
  DIPTYCH_TRY(of_dtype(op, "workspace", t, DType::u8));
  if (t.numel() < need || reinterpret_cast<uintptr_t>(t.data) % 16 != 0)
    return {Code::value, std::string(op) + ": workspace needs " + std::to_string(need) + " bytes, aligned to 16, got " +
                             describe(t)};
  for (const TensorView* other : others) DIPTYCH_TRY(apart(op, "workspace", t, "another operand", *other));
  return {};
}

}  // namespace

std::string describe(const TensorView& t) {
  return t.given() ? name(t.dtype) + shape_text(t.shape, t.rank) + " on " + device_text(t.device) : "nothing";
}

Extents extents(const QuantizedView& q) {
  if (q.columnwise && row(q.format).columnwise == ColumnwiseLayout::row_major) return {q.data.cols(), q.data.rows()};
  return {q.data.rows(), q.data.cols()};
}

Status check(const AmaxArgs& a, const Device& device) {
  DIPTYCH_TRY(present("amax", "x", a.x, device));
  DIPTYCH_TRY(high_precision("amax", "x", a.x));
  DIPTYCH_TRY(present("amax", "out", a.out, device));
  DIPTYCH_TRY(of_dtype("amax", "out", a.out, DType::f32));
  DIPTYCH_TRY(of_numel("amax", "out", a.out, 1));
  return apart("amax", "out", a.out, "x", a.x);
}

Status check(const QuantizeArgs& a, const Device& device) {
  constexpr const char* op = "quantize";
  DIPTYCH_TRY(known(op, a.spec.format));
  const FormatRow& f = row(a.spec.format);
  DIPTYCH_TRY(present(op, "x", a.x, device));
  DIPTYCH_TRY(high_precision(op, "x", a.x));
  DIPTYCH_TRY(ranked(op, "x", a.x));
  if (!(std::isfinite(a.spec.eps) && a.spec.eps >= 0.0f))
    return {Code::value, std::string(op) + ": eps must be finite and >= 0, got " + std::to_string(a.spec.eps)};
  if (f.rule != ScaleRule::divide && (a.spec.pow2 || a.spec.eps != 0.0f))
    return {Code::value,
            std::string(op) + ": " + f.name + " has power-of-two scales by itself; pow2 and eps do not apply"};
  if (!a.rowwise.given() && !a.columnwise.given())
    return {Code::value, std::string(op) + ": neither a rowwise nor a columnwise copy was asked for"};
  for (const QuantizedView* q : {&a.rowwise, &a.columnwise})
    if (!q->given() && q->scale_inv.given())
      return {Code::type, std::string(op) + ": " + (q->columnwise ? "columnwise" : "rowwise") + " scale_inv (" +
                              f.name + ") was given without its data"};
  if (f.per_tensor()) {
    DIPTYCH_TRY(present(op, "amax", a.amax, device));
    DIPTYCH_TRY(of_dtype(op, "amax", a.amax, DType::f32));
    DIPTYCH_TRY(of_numel(op, "amax", a.amax, 1));
    DIPTYCH_TRY(apart(op, "amax", a.amax, "x", a.x));
  } else if (a.amax.given() || a.amax_ready) {
    return {Code::value, std::string(op) + ": amax is for per-tensor formats; " + f.name + " takes one per block"};
  }
  const TensorView* outs[4] = {&a.rowwise.data, &a.rowwise.scale_inv, &a.columnwise.data, &a.columnwise.scale_inv};
  const char* names[4] = {"rowwise data", "rowwise scale_inv", "columnwise data", "columnwise scale_inv"};
  for (const QuantizedView* q : {&a.rowwise, &a.columnwise})
    if (q->given()) DIPTYCH_TRY(copy(op, q->columnwise ? "columnwise" : "rowwise", *q, a.x.rows(), a.x.cols(), device));
  for (int i = 0; i < 4; ++i) {
    DIPTYCH_TRY(apart(op, names[i], *outs[i], "x", a.x));
    DIPTYCH_TRY(apart(op, names[i], *outs[i], "amax", a.amax));
    for (int j = 0; j < i; ++j) DIPTYCH_TRY(apart(op, names[i], *outs[i], names[j], *outs[j]));
  }
  return {};
}

Status check(const DequantizeArgs& a, const Device& device) {
  constexpr const char* op = "dequantize";
  DIPTYCH_TRY(lone_copy(op, "q", a.q, device));
  const std::string out = std::string("out of ") + row(a.q.format).name;
  DIPTYCH_TRY(present(op, out.c_str(), a.out, device));
  DIPTYCH_TRY(high_precision(op, out.c_str(), a.out));
  const bool flip = a.q.columnwise && row(a.q.format).columnwise == ColumnwiseLayout::transposed;
  DIPTYCH_TRY(of_shape(op, out.c_str(), a.out, flip ? a.q.data.cols() : a.q.data.rows(),
                       flip ? a.q.data.rows() : a.q.data.cols()));
  DIPTYCH_TRY(apart(op, "out", a.out, "data", a.q.data));
  return apart(op, "out", a.out, "scale_inv", a.q.scale_inv);
}

Status check(const GemmArgs& a, const Device& device) {
  constexpr const char* op = "gemm";
  DIPTYCH_TRY(lone_copy(op, "a", a.a, device));
  DIPTYCH_TRY(lone_copy(op, "b", a.b, device));
  const Extents ea = extents(a.a), eb = extents(a.b);
  const std::string pair = std::string(row(a.a.format).name) + " x " + row(a.b.format).name;
  if (ea.reduced != eb.reduced)
    return {Code::value, "gemm (" + pair + "): a reduces over " + std::to_string(ea.reduced) + " elements, b over " +
                             std::to_string(eb.reduced) + "; a is " + describe(a.a.data) + ", b " + describe(a.b.data)};
  DIPTYCH_TRY(present(op, "d", a.d, device));
  DIPTYCH_TRY(high_precision(op, "d", a.d));
  DIPTYCH_TRY(of_shape(op, "d", a.d, ea.kept, eb.kept));
  if (!std::isfinite(a.alpha) || !std::isfinite(a.beta)) return {Code::value, "gemm: alpha and beta must be finite"};
  if (a.beta != 0.0f && !a.c.given()) return {Code::value, "gemm: beta is not 0 and no c was given"};
  if (a.c.given()) {
    DIPTYCH_TRY(present(op, "c", a.c, device));
    DIPTYCH_TRY(of_dtype(op, "c", a.c, a.d.dtype));
    DIPTYCH_TRY(of_shape(op, "c", a.c, ea.kept, eb.kept));
    if (a.c.data != a.d.data) DIPTYCH_TRY(apart(op, "d", a.d, "c", a.c));
  }
  if (a.bias.given()) {
    DIPTYCH_TRY(present(op, "bias", a.bias, device));
    DIPTYCH_TRY(high_precision(op, "bias", a.bias));
    DIPTYCH_TRY(of_numel(op, "bias", a.bias, eb.kept));
  }
  if (a.fast_accum && !(row(a.a.format).per_tensor() && row(a.b.format).per_tensor()))
    return {Code::value, "gemm: fast_accum exists for per-tensor FP8 only, got " + pair};
  DIPTYCH_TRY(workspace(op, a.workspace,
                        gemm_workspace_bytes(ea.kept, eb.kept, ea.reduced, a.bias.given() || a.beta != 0.0f), device,
                        {&a.d, &a.c, &a.bias, &a.a.data, &a.a.scale_inv, &a.b.data, &a.b.scale_inv}));
  for (const TensorView* in : {&a.a.data, &a.a.scale_inv, &a.b.data, &a.b.scale_inv, &a.bias})
    DIPTYCH_TRY(apart(op, "d", a.d, "another operand", *in));
  return {};
}

Status check(const BiasGradArgs& a, const Device& device) {
  constexpr const char* op = "bias_grad";
  DIPTYCH_TRY(present(op, "dy", a.dy, device));
  DIPTYCH_TRY(high_precision(op, "dy", a.dy));
  DIPTYCH_TRY(ranked(op, "dy", a.dy));
  DIPTYCH_TRY(present(op, "out", a.out, device));
  DIPTYCH_TRY(high_precision(op, "out", a.out));
  DIPTYCH_TRY(of_numel(op, "out", a.out, a.dy.cols()));
  DIPTYCH_TRY(workspace(op, a.workspace, bias_grad_workspace_bytes(a.dy.rows(), a.dy.cols()), device, {&a.out, &a.dy}));
  return apart(op, "out", a.out, "dy", a.dy);
}

}  // namespace diptych
