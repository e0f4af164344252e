// Contract of what quantize and amax read instead of their input.
#include "contracts/parts.h"

namespace diptych {

using namespace contract;

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
    DIPTYCH_TRY(row_source(op, s.row_source, device));
  } else {
    DIPTYCH_TRY(activation_kind(op, s.activation, x, s.gated));
    DIPTYCH_TRY(none("activations have no parameters", {&s.gamma, &s.beta, &s.mu, &s.rsigma}));
    if (s.kind == SourceKind::activation) {
      DIPTYCH_TRY(none("an activation has no dy", {&s.dy}));
    } else {
      DIPTYCH_TRY(folded(op, "dy", s.dy, x.rows(), s.gated ? x.cols() / 2 : x.cols(), device));
    }
  }
  const Operands read = operands(s);
  for (const TensorView* out : outs)
    for (int i = 0; i < read.count; ++i)
      DIPTYCH_TRY(apart(op, "an output", *out, "an operand of the source", *read.all[i].tensor));
  return {};
}

}  // namespace diptych
