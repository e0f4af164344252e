// The contract of quantize_stack: each tensor of the stack is a valid call of quantize.
#include "diptych/stack.h"

#include <string>

#include "contracts/parts.h"

namespace diptych {

using namespace contract;

// All tensors share the leading extent, and outputs overlap neither each other nor inputs. The checks of quantize cover
// each tensor of the stack.
Status check(const QuantizeStackArgs& args, const Device& device) {
  constexpr const char* kOp = "quantize_stack";
  const QuantizeArgs& a = args.stack;
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
  DIPTYCH_TRY(all_apart(kOp, operands(a)));
  if (a.x.shape[0] == 0) return {};
  if (const Status first = check(slice(a, 0), device); !first.ok())
    return {first.code(), std::string(kOp) + ": for each tensor of x " + describe(a.x) + ": " + first.message()};
  return {};
}

}  // namespace diptych
