// Contracts of activations.
#include "contracts/parts.h"

namespace diptych {

using namespace contract;

Status check(const ActivationArgs& a, const Device& device) {
  constexpr const char* op = "activation";
  DIPTYCH_TRY(input(op, a.x, device));
  DIPTYCH_TRY(activation_kind(op, a.kind, a.x, a.gated));
  DIPTYCH_TRY(folded(op, "y", a.y, a.x.rows(), a.gated ? a.x.cols() / 2 : a.x.cols(), device));
  return all_apart(op, operands(a));
}

Status check(const ActivationGradArgs& a, const Device& device) {
  constexpr const char* op = "activation_grad";
  DIPTYCH_TRY(input(op, a.x, device));
  DIPTYCH_TRY(activation_kind(op, a.kind, a.x, a.gated));
  DIPTYCH_TRY(folded(op, "dy", a.dy, a.x.rows(), a.gated ? a.x.cols() / 2 : a.x.cols(), device));
  DIPTYCH_TRY(folded(op, "dx", a.dx, a.x.rows(), a.x.cols(), device));
  return all_apart(op, operands(a));
}

}  // namespace diptych
