// Contracts of norms.
#include <cmath>

#include "contracts/parts.h"

namespace diptych {

using namespace contract;

Status check(const NormArgs& a, const Device& device) {
  constexpr const char* op = "norm";
  DIPTYCH_TRY(input(op, a.x, device));
  DIPTYCH_TRY(statistics(op, a.norm, a.mu, a.rsigma, a.x.rows(), "beta", a.beta, device));
  if (!(std::isfinite(a.eps) && a.eps >= 0.0f))
    return {Code::value, std::string(op) + ": eps must be finite and >= 0, got " + std::to_string(a.eps)};
  if (a.y.given()) {
    DIPTYCH_TRY(folded(op, "y", a.y, a.x.rows(), a.x.cols(), device));
    DIPTYCH_TRY(vector(op, "gamma", a.gamma, a.x.cols(), device));
    if (a.beta.given()) DIPTYCH_TRY(vector(op, "beta", a.beta, a.x.cols(), device));
  } else {
    DIPTYCH_TRY(absent(op, "gamma", a.gamma, "without y only the statistics are computed"));
    DIPTYCH_TRY(absent(op, "beta", a.beta, "without y only the statistics are computed"));
    if (a.zero_centered_gamma) return {Code::value, std::string(op) + ": zero_centered_gamma without y and gamma"};
  }
  return all_apart(op, operands(a));
}

Status check(const NormGradArgs& a, const Device& device) {
  constexpr const char* op = "norm_grad";
  DIPTYCH_TRY(input(op, a.x, device));
  const int64_t m = a.x.rows(), k = a.x.cols();
  DIPTYCH_TRY(folded(op, "dy", a.dy, m, k, device));
  DIPTYCH_TRY(vector(op, "gamma", a.gamma, k, device));
  DIPTYCH_TRY(statistics(op, a.norm, a.mu, a.rsigma, m, "dbeta", a.dbeta, device));
  DIPTYCH_TRY(folded(op, "dx", a.dx, m, k, device));
  DIPTYCH_TRY(of_dtype(op, "dx", a.dx, a.x.dtype));
  DIPTYCH_TRY(vector(op, "dgamma", a.dgamma, k, device));
  DIPTYCH_TRY(of_dtype(op, "dgamma", a.dgamma, a.gamma.dtype));
  if (a.dbeta.given()) {
    DIPTYCH_TRY(vector(op, "dbeta", a.dbeta, k, device));
    DIPTYCH_TRY(of_dtype(op, "dbeta", a.dbeta, a.gamma.dtype));
  }
  DIPTYCH_TRY(workspace(op, a.workspace, norm_grad_workspace_bytes(m, k), device, operands(a)));
  return all_apart(op, operands(a));
}

}  // namespace diptych
