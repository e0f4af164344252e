// quantize_stack quantizes each tensor of a stack as quantize would: with a single kernel if one supports the stack,
// else tensor by tensor.
#include "diptych/stack.h"

#include <optional>
#include <string>

#include "contracts/parts.h"
#include "registry.h"

namespace diptych {

using namespace contract;

namespace {

constexpr const char* kOp = "quantize_stack";

// All tensors share the leading extent, and outputs overlap neither each other nor inputs. The checks of quantize cover
// each tensor of the stack.
Status check_stack(const QuantizeArgs& a, const Device& device) {
  DIPTYCH_TRY(present(kOp, "x", a.x, device));
  if (a.x.rank < 2)
    return {Code::shape, std::string(kOp) + ": x must be a stack of tensors [G, ..., K], got " + describe(a.x)};
  DIPTYCH_TRY(absent(kOp, "column_sum", a.column_sum, "the tensors of a stack are not summed"));
  DIPTYCH_TRY(absent(kOp, "workspace", a.workspace, "the tensors of a stack are not summed"));
  if (a.source.kind != SourceKind::plain)
    return {Code::value, std::string(kOp) + ": the tensors of a stack are encoded as they are; give no source"};
  struct Named {
    const char* name;
    const TensorView& t;
  };
  const Named all[] = {{"amax", a.amax},
                       {"columnwise_amax", a.columnwise_amax},
                       {"scale", a.scale},
                       {"rng", a.rng},
                       {"rowwise data", a.rowwise.data},
                       {"rowwise scale_inv", a.rowwise.scale_inv},
                       {"columnwise data", a.columnwise.data},
                       {"columnwise scale_inv", a.columnwise.scale_inv}};
  for (const auto& [arg, t] : all) {
    if (!t.given()) continue;
    DIPTYCH_TRY(present(kOp, arg, t, device));
    if (t.rank < 1 || t.shape[0] != a.x.shape[0])
      return {Code::shape, std::string(kOp) + ": " + arg + " must have " + std::to_string(a.x.shape[0]) +
                               " as its first extent, one for each tensor of x " + describe(a.x) + ", got " +
                               describe(t)};
  }
  return all_apart(kOp, operands(a));
}

}  // namespace

Status quantize_stack(const QuantizeArgs& a, const Execution& exec) {
  DIPTYCH_TRY(check_stack(a, exec.device));
  const int64_t count = a.x.shape[0];
  if (count == 0) return {};
  if (const Status first = check(slice(a, 0), exec.device); !first.ok())
    return {first.code(), std::string(kOp) + ": for each tensor of x " + describe(a.x) + ": " + first.message()};
  bool writes = false;  // if all outputs are empty, `count` may be huge: do not loop over it
  for (const TensorView* t : {&a.amax, &a.columnwise_amax, &a.rowwise.data, &a.rowwise.scale_inv, &a.columnwise.data,
                              &a.columnwise.scale_inv})
    writes |= t->given() && t->numel() > 0;
  if (!writes) return {};
  if (std::optional<Status> done = quantize_together(a, exec)) return *done;
  for (int64_t g = 0; g < count; ++g) DIPTYCH_TRY(quantize(slice(a, g), exec));
  return {};
}

}  // namespace diptych
