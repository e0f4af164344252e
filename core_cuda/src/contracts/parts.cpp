// The pieces that contracts are made of.
#include "contracts/parts.h"

#include <cmath>
#include <cstdint>

namespace diptych {
namespace {

std::string device_text(const Device& d) {
  return d.backend == Backend::cpu ? "cpu" : "cuda:" + std::to_string(d.index);
}

}  // namespace

std::string describe(const TensorView& t) {
  return t.given() ? name(t.dtype) + contract::shape_text(t.shape, t.rank) + " on " + device_text(t.device) : "nothing";
}

namespace contract {

std::string shape_text(const int64_t* shape, int rank) {
  std::string out = "[";
  for (int i = 0; i < rank; ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

std::string shape_text(std::initializer_list<int64_t> shape) {
  return shape_text(shape.begin(), static_cast<int>(shape.size()));
}

Status present(const char* op, const char* arg, const TensorView& t, const Device& device) {
  const std::string who = std::string(op) + ": " + arg;
  if (!t.given()) return {Code::argument, who + " is missing"};
  if (t.device != device)
    return {Code::device, who + " is on " + device_text(t.device) + ", the other operands on " + device_text(device)};
  if (!t.contiguous) return {Code::shape, who + " " + describe(t) + " is not contiguous; pass a contiguous copy"};
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
  return {Code::shape, std::string(op) + ": " + arg + " must be " + shape_text({n}) + ", got " + describe(t)};
}

Status of_shape(const char* op, const char* arg, const TensorView& t, int64_t rows, int64_t cols) {
  if (t.rank >= 1 && t.rows() == rows && t.cols() == cols) return {};
  return {Code::shape, std::string(op) + ": " + arg + " must be " + shape_text({rows, cols}) + ", got " + describe(t)};
}

Status ranked(const char* op, const char* arg, const TensorView& t) {
  if (t.rank >= 1) return {};
  return {Code::shape, std::string(op) + ": " + arg + " must have at least one dimension, got a scalar"};
}

Status holds(const char* op, const char* arg, const TensorView& t, DType dtype, int64_t n, const Device& device) {
  DIPTYCH_TRY(present(op, arg, t, device));
  DIPTYCH_TRY(of_dtype(op, arg, t, dtype));
  return of_numel(op, arg, t, n);
}

Status floats(const char* op, const char* arg, const TensorView& t, int64_t n, const Device& device) {
  return holds(op, arg, t, DType::f32, n, device);
}

static bool overlap(const TensorView& a, const TensorView& b) {
  const auto* a0 = a.as<const char>();
  const auto* b0 = b.as<const char>();
  return a.numel() > 0 && b.numel() > 0 && a0 < b0 + b.numel() * bytes(b.dtype) && b0 < a0 + a.numel() * bytes(a.dtype);
}

Status apart(const char* op, const char* out_name, const TensorView& out, const char* in_name, const TensorView& in) {
  if (!in.given() || !out.given() || !overlap(out, in)) return {};
  return {Code::value, std::string(op) + ": " + out_name + " overlaps " + in_name + " in memory"};
}

Status workspace(const char* op, const TensorView& t, int64_t need, const Device& device, const Operands& o) {
  if (device.backend == Backend::cpu || need == 0) return {};
  DIPTYCH_TRY(present(op, "workspace", t, device));
  DIPTYCH_TRY(of_dtype(op, "workspace", t, DType::u8));
  if (t.numel() < need || reinterpret_cast<uintptr_t>(t.data) % 16 != 0)
    return {Code::value, std::string(op) + ": workspace needs " + std::to_string(need) + " bytes, aligned to 16, got " +
                             describe(t)};
  for (int i = 0; i < o.count; ++i)
    if (o.all[i].role != Role::workspace) DIPTYCH_TRY(apart(op, "workspace", t, "another operand", *o.all[i].tensor));
  return {};
}

Status absent(const char* op, const char* arg, const TensorView& t, const char* why) {
  if (!t.given()) return {};
  return {Code::value, std::string(op) + ": " + arg + " was given and is not read: " + why};
}

Status all_apart(const char* op, const Operands& o, const char* output, const char* input) {
  for (int i = 0; i < o.count; ++i) {
    if (o.all[i].role != Role::output) continue;
    for (int j = 0; j < o.count; ++j)
      if (o.all[j].role == Role::input) DIPTYCH_TRY(apart(op, output, *o.all[i].tensor, input, *o.all[j].tensor));
    for (int j = 0; j < i; ++j)
      if (o.all[j].role == Role::output)
        DIPTYCH_TRY(apart(op, output, *o.all[i].tensor, "another output", *o.all[j].tensor));
  }
  return {};
}

Status folded(const char* op, const char* arg, const TensorView& t, int64_t rows, int64_t cols, const Device& device) {
  DIPTYCH_TRY(present(op, arg, t, device));
  DIPTYCH_TRY(high_precision(op, arg, t));
  return of_shape(op, arg, t, rows, cols);
}

Status vector(const char* op, const char* arg, const TensorView& t, int64_t n, const Device& device) {
  DIPTYCH_TRY(present(op, arg, t, device));
  DIPTYCH_TRY(high_precision(op, arg, t));
  return of_numel(op, arg, t, n);
}

Status input(const char* op, const TensorView& x, const Device& device) {
  DIPTYCH_TRY(present(op, "x", x, device));
  DIPTYCH_TRY(high_precision(op, "x", x));
  return ranked(op, "x", x);
}

Status statistics(const char* op, Norm norm, const TensorView& mu, const TensorView& rsigma, int64_t m,
                  const char* beta_name, const TensorView& beta, const Device& device) {
  if (norm < Norm::layernorm || norm >= Norm::count_)
    return {Code::value, std::string(op) + ": unknown norm " + std::to_string(static_cast<int32_t>(norm))};
  DIPTYCH_TRY(floats(op, "rsigma", rsigma, m, device));
  if (norm == Norm::layernorm) return floats(op, "mu", mu, m, device);
  DIPTYCH_TRY(absent(op, "mu", mu, "rmsnorm takes no mean"));
  return absent(op, beta_name, beta, "rmsnorm has no beta");
}

Status activation_kind(const char* op, Activation kind, const TensorView& x, bool gated) {
  if (kind < Activation::gelu || kind >= Activation::count_)
    return {Code::value, std::string(op) + ": unknown activation " + std::to_string(static_cast<int32_t>(kind))};
  if (!gated || x.cols() % 2 == 0) return {};
  return {Code::shape, std::string(op) + ": a gated activation halves the last dimension of x, got " + describe(x)};
}

}  // namespace contract
}  // namespace diptych
