// Contracts of norms and activations, alone and as a source.
#include <cmath>

#include "check_parts.h"

namespace diptych {

using namespace contract;

Status contract::absent(const char* op, const char* arg, const TensorView& t, const char* why) {
  if (!t.given()) return {};
  return {Code::value, std::string(op) + ": " + arg + " was given and is not read: " + why};
}

Status contract::all_apart(const char* op, std::initializer_list<const TensorView*> outs,
                           std::initializer_list<const TensorView*> ins) {
  for (auto out = outs.begin(); out != outs.end(); ++out) {
    for (const TensorView* in : ins) DIPTYCH_TRY(apart(op, "an output", **out, "an input", *in));
    for (auto other = outs.begin(); other != out; ++other)
      DIPTYCH_TRY(apart(op, "an output", **out, "another output", **other));
  }
  return {};
}

namespace {

// A high-precision tensor of any rank that is [rows, cols] when folded
Status matrix(const char* op, const char* arg, const TensorView& t, int64_t rows, int64_t cols, const Device& device) {
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

// mu belongs to layernorm, and so does beta (or its gradient).
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
  return {Code::value, std::string(op) + ": a gated activation halves the last dimension of x, got " + describe(x)};
}

}  // namespace

Status contract::source(const char* op, const TensorView& x, const Source& s, const Device& device,
                        std::initializer_list<const TensorView*> outs) {
  const auto none = [&](const char* why, std::initializer_list<const TensorView*> tensors) -> Status {
    for (const TensorView* t : tensors) DIPTYCH_TRY(absent(op, "an operand of the source", *t, why));
    return {};
  };
  if (s.kind < SourceKind::plain || s.kind >= SourceKind::count_)
    return {Code::value, std::string(op) + ": unknown source " + std::to_string(static_cast<int32_t>(s.kind))};
  const bool active = s.kind == SourceKind::activation || s.kind == SourceKind::activation_grad;
  if ((s.gated && !active) || (s.zero_centered_gamma && s.kind != SourceKind::norm))
    return {Code::value, std::string(op) + ": gated is for activations and zero_centered_gamma for norms"};
  if (s.kind != SourceKind::permuted) DIPTYCH_TRY(none("rows keep their order", {&s.row_id_map, &s.row_source}));
  if (s.kind == SourceKind::plain) return none("x itself is encoded", {&s.gamma, &s.beta, &s.mu, &s.rsigma, &s.dy});
  DIPTYCH_TRY(ranked(op, "x", x));
  if (s.kind == SourceKind::norm) {
    DIPTYCH_TRY(statistics(op, s.norm, s.mu, s.rsigma, x.rows(), "beta", s.beta, device));
    DIPTYCH_TRY(vector(op, "gamma", s.gamma, x.cols(), device));
    if (s.beta.given()) DIPTYCH_TRY(vector(op, "beta", s.beta, x.cols(), device));
    DIPTYCH_TRY(none("a norm has no dy", {&s.dy}));
  } else if (s.kind == SourceKind::permuted) {
    DIPTYCH_TRY(none("rows are encoded as they are", {&s.gamma, &s.beta, &s.mu, &s.rsigma, &s.dy}));
    DIPTYCH_TRY(row_map(op, s.row_id_map, device));
    DIPTYCH_TRY(of_shape(op, "row_id_map", s.row_id_map, x.rows(), s.row_id_map.cols()));
    DIPTYCH_TRY(source_map(op, s.row_source, device));
  } else {
    DIPTYCH_TRY(activation_kind(op, s.activation, x, s.gated));
    DIPTYCH_TRY(none("activations have no parameters", {&s.gamma, &s.beta, &s.mu, &s.rsigma}));
    if (s.kind == SourceKind::activation) {
      DIPTYCH_TRY(none("an activation has no dy", {&s.dy}));
    } else {
      DIPTYCH_TRY(matrix(op, "dy", s.dy, x.rows(), s.gated ? x.cols() / 2 : x.cols(), device));
    }
  }
  for (const TensorView* out : outs)
    for (const TensorView* in : {&s.gamma, &s.beta, &s.mu, &s.rsigma, &s.dy, &s.row_id_map, &s.row_source})
      DIPTYCH_TRY(apart(op, "an output", *out, "an operand of the source", *in));
  return {};
}

Status check(const NormArgs& a, const Device& device) {
  constexpr const char* op = "norm";
  DIPTYCH_TRY(input(op, a.x, device));
  DIPTYCH_TRY(statistics(op, a.norm, a.mu, a.rsigma, a.x.rows(), "beta", a.beta, device));
  if (!(std::isfinite(a.eps) && a.eps >= 0.0f))
    return {Code::value, std::string(op) + ": eps must be finite and >= 0, got " + std::to_string(a.eps)};
  if (a.y.given()) {
    DIPTYCH_TRY(matrix(op, "y", a.y, a.x.rows(), a.x.cols(), device));
    DIPTYCH_TRY(vector(op, "gamma", a.gamma, a.x.cols(), device));
    if (a.beta.given()) DIPTYCH_TRY(vector(op, "beta", a.beta, a.x.cols(), device));
  } else {
    DIPTYCH_TRY(absent(op, "gamma", a.gamma, "without y, the statistics are all"));
    DIPTYCH_TRY(absent(op, "beta", a.beta, "without y, the statistics are all"));
    if (a.zero_centered_gamma) return {Code::value, std::string(op) + ": zero_centered_gamma without y and gamma"};
  }
  return all_apart(op, {&a.y, &a.mu, &a.rsigma}, {&a.x, &a.gamma, &a.beta});
}

Status check(const NormGradArgs& a, const Device& device) {
  constexpr const char* op = "norm_grad";
  DIPTYCH_TRY(input(op, a.x, device));
  const int64_t m = a.x.rows(), k = a.x.cols();
  DIPTYCH_TRY(matrix(op, "dy", a.dy, m, k, device));
  DIPTYCH_TRY(vector(op, "gamma", a.gamma, k, device));
  DIPTYCH_TRY(statistics(op, a.norm, a.mu, a.rsigma, m, "dbeta", a.dbeta, device));
  DIPTYCH_TRY(matrix(op, "dx", a.dx, m, k, device));
  DIPTYCH_TRY(of_dtype(op, "dx", a.dx, a.x.dtype));
  DIPTYCH_TRY(vector(op, "dgamma", a.dgamma, k, device));
  DIPTYCH_TRY(of_dtype(op, "dgamma", a.dgamma, a.gamma.dtype));
  if (a.dbeta.given()) {
    DIPTYCH_TRY(vector(op, "dbeta", a.dbeta, k, device));
    DIPTYCH_TRY(of_dtype(op, "dbeta", a.dbeta, a.gamma.dtype));
  }
  DIPTYCH_TRY(workspace(op, a.workspace, norm_grad_workspace_bytes(m, k), device,
                        {&a.dy, &a.x, &a.gamma, &a.mu, &a.rsigma, &a.dx, &a.dgamma, &a.dbeta}));
  return all_apart(op, {&a.dx, &a.dgamma, &a.dbeta}, {&a.dy, &a.x, &a.gamma, &a.mu, &a.rsigma});
}

Status check(const ActivationArgs& a, const Device& device) {
  constexpr const char* op = "activation";
  DIPTYCH_TRY(input(op, a.x, device));
  DIPTYCH_TRY(activation_kind(op, a.kind, a.x, a.gated));
  DIPTYCH_TRY(matrix(op, "y", a.y, a.x.rows(), a.gated ? a.x.cols() / 2 : a.x.cols(), device));
  return all_apart(op, {&a.y}, {&a.x});
}

Status check(const ActivationGradArgs& a, const Device& device) {
  constexpr const char* op = "activation_grad";
  DIPTYCH_TRY(input(op, a.x, device));
  DIPTYCH_TRY(activation_kind(op, a.kind, a.x, a.gated));
  DIPTYCH_TRY(matrix(op, "dy", a.dy, a.x.rows(), a.gated ? a.x.cols() / 2 : a.x.cols(), device));
  DIPTYCH_TRY(matrix(op, "dx", a.dx, a.x.rows(), a.x.cols(), device));
  return all_apart(op, {&a.dx}, {&a.dy, &a.x});
}

}  // namespace diptych
