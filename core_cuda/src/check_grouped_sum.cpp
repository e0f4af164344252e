// Contract of grouped_bias_grad.
#include <string>

#include "check_parts.h"

namespace diptych {

using namespace contract;

Status check(const GroupedBiasGradArgs& a, const Device& device) {
  constexpr const char* op = "grouped_bias_grad";
  const auto refuse = [&](const char* arg, const char* form, const TensorView& t) {
    return Status(Code::value, std::string(op) + ": " + arg + " must be " + form + ", got " + describe(t));
  };
  DIPTYCH_TRY(present(op, "dy", a.dy, device));
  DIPTYCH_TRY(high_precision(op, "dy", a.dy));
  DIPTYCH_TRY(ranked(op, "dy", a.dy));
  DIPTYCH_TRY(present(op, "offsets", a.offsets, device));
  DIPTYCH_TRY(of_dtype(op, "offsets", a.offsets, DType::i32));
  if (a.offsets.rank != 1 || a.offsets.numel() < 1) return refuse("offsets", "[groups + 1]", a.offsets);
  const int64_t groups = a.offsets.numel() - 1;
  DIPTYCH_TRY(present(op, "out", a.out, device));
  DIPTYCH_TRY(high_precision(op, "out", a.out));
  if (a.out.rank != 2) return refuse("out", "[groups, N]", a.out);
  DIPTYCH_TRY(of_shape(op, "out", a.out, groups, a.dy.cols()));
  const int64_t need = grouped_bias_grad_workspace_bytes(a.dy.rows(), a.dy.cols(), groups);
  DIPTYCH_TRY(workspace(op, a.workspace, need, device, {&a.out, &a.dy, &a.offsets}));
  return all_apart(op, {&a.out}, {&a.dy, &a.offsets});
}

}  // namespace diptych
