// Contracts of logs of amaxes and of the update of scales.
#include <cmath>

#include "contracts/parts.h"

namespace diptych {

using namespace contract;

static Status log(const char* op, const AmaxLog& log, int64_t n, const Device& device) {
  DIPTYCH_TRY(present(op, "log", log.amaxes, device));
  DIPTYCH_TRY(of_dtype(op, "log", log.amaxes, DType::f32));
  DIPTYCH_TRY(ranked(op, "log", log.amaxes));
  if (log.amaxes.cols() < 1) return {Code::shape, std::string(op) + ": log " + describe(log.amaxes) + " has no column"};
  DIPTYCH_TRY(of_shape(op, "log", log.amaxes, n, log.amaxes.cols()));
  return holds(op, "written", log.written, DType::i64, 1, device);
}

Status check(const LogAmaxArgs& a, const Device& device) {
  constexpr const char* op = "log_amax";
  DIPTYCH_TRY(present(op, "amax", a.amax, device));
  DIPTYCH_TRY(of_dtype(op, "amax", a.amax, DType::f32));
  DIPTYCH_TRY(log(op, a.log, a.amax.numel(), device));
  return apart(op, "log", a.log.amaxes, "amax", a.amax);
}

Status check(const ScaleUpdateArgs& a, const Device& device) {
  constexpr const char* op = "scale_update";
  DIPTYCH_TRY(present(op, "history", a.history, device));
  DIPTYCH_TRY(of_dtype(op, "history", a.history, DType::f32));
  DIPTYCH_TRY(ranked(op, "history", a.history));
  const int64_t n = a.history.rows(), length = a.history.cols();
  if (length < 1)
    return {Code::shape, std::string(op) + ": history must be [n, L] with L >= 1, got " + describe(a.history)};
  DIPTYCH_TRY(floats(op, "scale", a.scale, n, device));
  if (a.reduced.given()) DIPTYCH_TRY(floats(op, "reduced", a.reduced, n, device));
  if (a.amax.given()) DIPTYCH_TRY(floats(op, "amax", a.amax, n, device));
  DIPTYCH_TRY(floats(op, "new_history", a.new_history, n * length, device));
  DIPTYCH_TRY(of_shape(op, "new_history", a.new_history, n, length));
  DIPTYCH_TRY(floats(op, "new_scale", a.new_scale, n, device));
  if (a.seen.given() != a.step.given())
    return {Code::value, std::string(op) + ": seen and step come together, got seen " + describe(a.seen) +
                             " and step " + describe(a.step)};
  if (a.seen.given()) {
    DIPTYCH_TRY(holds(op, "seen", a.seen, DType::i64, 1, device));
    DIPTYCH_TRY(holds(op, "step", a.step, DType::i64, 1, device));
  }
  if (!(std::isfinite(a.fp8_max) && a.fp8_max > 0.0f))
    return {Code::value, std::string(op) + ": fp8_max must be finite and > 0, got " + std::to_string(a.fp8_max)};
  if (a.margin < -126 || a.margin > 126)  // 2^-margin is a normal float32
    return {Code::value, std::string(op) + ": margin must lie in -126..126, got " + std::to_string(a.margin)};
  if (a.most_recent && a.amax.given())
    return {Code::value, std::string(op) + ": amax was given; most_recent does not apply"};
  if ((a.pending.given() || a.log.given()) && a.new_history.data != a.history.data)
    return {Code::value, std::string(op) + ": pending and log go into a history that is updated in place"};
  if (a.pending.given()) DIPTYCH_TRY(floats(op, "pending", a.pending, n, device));
  if (a.log.given() != a.taken.given())
    return {Code::value, std::string(op) + ": log and taken come together, got log " + describe(a.log.amaxes) +
                             " and taken " + describe(a.taken)};
  if (a.log.given()) {
    DIPTYCH_TRY(log(op, a.log, n, device));
    DIPTYCH_TRY(holds(op, "taken", a.taken, DType::i64, n, device));
  }
  if (a.scale_out.given()) DIPTYCH_TRY(floats(op, "scale_out", a.scale_out, n, device));
  for (const TensorView* in : {&a.scale, &a.reduced, &a.amax, &a.seen, &a.step, &a.pending, &a.taken, &a.scale_out})
    DIPTYCH_TRY(apart(op, "new_history", a.new_history, "another operand", *in));
  for (const TensorView* in : {&a.history, &a.reduced, &a.amax, &a.seen, &a.step, &a.new_history})
    DIPTYCH_TRY(apart(op, "new_scale", a.new_scale, "another operand", *in));
  // An output may be its input itself, but may not overlap it partly.
  if (a.new_history.data != a.history.data) DIPTYCH_TRY(apart(op, "new_history", a.new_history, "history", a.history));
  if (a.new_scale.data != a.scale.data) return apart(op, "new_scale", a.new_scale, "scale", a.scale);
  return {};
}

}  // namespace diptych
