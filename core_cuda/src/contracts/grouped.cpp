// Contracts of grouped_gemm and grouped_bias_grad.
#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>

#include "contracts/parts.h"

namespace diptych {

using namespace contract;

namespace {

constexpr const char* kOp = "grouped_gemm";

Status refuse(const std::string& why, Code code = Code::value) { return {code, std::string(kOp) + ": " + why}; }

// The tensor has exactly this shape; unlike of_shape, leading dimensions do not fold.
Status shaped(const char* arg, const TensorView& t, std::initializer_list<int64_t> shape) {
  if (t.rank == static_cast<int32_t>(shape.size()) && std::equal(shape.begin(), shape.end(), t.shape)) return {};
  return refuse(std::string(arg) + " must be " + shape_text(shape) + ", got " + describe(t), Code::shape);
}

// Checks a stack of `groups` tensors and sets `each` to the view of tensor 0, or of what it would be if there are none.
Status stack(const QuantizedView& q, int64_t groups, QuantizedView* each, const Device& device) {
  DIPTYCH_TRY(known(kOp, q.format));
  if (q.data.given() && q.data.rank != 3)
    return refuse("b must be a stack of matrices, one for each group; its data is " + describe(q.data), Code::shape);
  const std::pair<const char*, const TensorView*> parts[] = {
      {"data", &q.data}, {"scale_inv", &q.scale_inv}, {"amax", &q.amax}};
  for (const auto& [part, t] : parts) {
    if (!t->given()) continue;  // lone_copy checks that it is given
    const std::string arg = std::string("b ") + part + " (" + row(q.format).name + ")";
    DIPTYCH_TRY(present(kOp, arg.c_str(), *t, device));
    if (t->rank < 1 || t->shape[0] != groups)
      return refuse(arg + " must begin with the number of groups, " + std::to_string(groups) + ", got " + describe(*t),
                    Code::shape);
  }
  *each = slice(q, 0);
  if (groups > 0) return {};
  static const int64_t nothing = 0;  // an aligned address, which is never read
  for (TensorView* t : {&each->data, &each->scale_inv, &each->amax}) t->data = const_cast<int64_t*>(&nothing);
  return {};
}

std::string copies(const GroupedGemmArgs& a) {
  const auto side = [](const QuantizedView& q) { return std::string(q.columnwise ? "columnwise" : "rowwise"); };
  return side(a.a) + " and " + side(a.b);
}

Status promises(const GroupedGemmArgs& a, const std::string& pair) {
  if (a.align != 1 && a.align != 16 && a.align != 32 && a.align != 128)
    return refuse("align must be 1, 16, 32 or 128, got " + std::to_string(a.align));
  if (!a.rotated) return {};
  if (a.kind != GroupKind::depth)
    return refuse(
        "rotated is for kind depth: kind rows reads a rowwise copy, and only columnwise copies are Hadamard-rotated (" +
        pair + ")");
  if (row(a.a.format).rule != ScaleRule::two_level || row(a.b.format).rule != ScaleRule::two_level)
    return refuse("no copies of " + pair + " are Hadamard-rotated; rotated is for two-level formats");
  if (a.align % 16 == 0) return {};
  return refuse(
      "Hadamard-rotated copies mix 16 rows, so that groups must begin at multiples of 16; align must be 16, 32 "
      "or 128, got " +
      std::to_string(a.align) + " (" + pair + ")");
}

}  // namespace

Status check(const GroupedGemmArgs& a, const Device& device) {
  if (a.kind < GroupKind::rows || a.kind >= GroupKind::count_)
    return refuse("unknown kind " + std::to_string(static_cast<int32_t>(a.kind)));
  const bool depth = a.kind == GroupKind::depth;
  DIPTYCH_TRY(present(kOp, "offsets", a.offsets, device));
  DIPTYCH_TRY(of_dtype(kOp, "offsets", a.offsets, DType::i32));
  if (a.offsets.rank != 1 || a.offsets.numel() < 1)
    return refuse("offsets must be [groups + 1], got " + describe(a.offsets), Code::shape);
  const int64_t groups = a.offsets.numel() - 1;
  DIPTYCH_TRY(lone_copy(kOp, "a", a.a, device));
  QuantizedView b = a.b;
  if (!depth) DIPTYCH_TRY(stack(a.b, groups, &b, device));
  DIPTYCH_TRY(lone_copy(kOp, "b", b, device));
  const std::string pair = std::string(row(a.a.format).name) + " x " + row(a.b.format).name;
  if (a.a.columnwise != depth || (depth && !b.columnwise))
    return refuse((depth ? "a product over the rows of groups reads the columnwise copies of both operands, got "
                         : "a product for each row reads the rowwise copy of a, got ") +
                  copies(a) + " (" + pair + ")");
  DIPTYCH_TRY(promises(a, pair));
  const Extents ea = extents(a.a), eb = extents(b);
  DIPTYCH_TRY(same_depth(kOp, a.a, b));
  DIPTYCH_TRY(present(kOp, "d", a.d, device));
  if (depth) {
    DIPTYCH_TRY(shaped("d", a.d, {groups, ea.kept, eb.kept}));
    DIPTYCH_TRY(absent(kOp, "bias", a.bias, "weights' gradients have none"));
  } else if (a.bias.given()) {
    DIPTYCH_TRY(present(kOp, "bias", a.bias, device));
    DIPTYCH_TRY(high_precision(kOp, "bias", a.bias));
    DIPTYCH_TRY(shaped("bias", a.bias, {groups, eb.kept}));
  }
  DIPTYCH_TRY(result(kOp, a.d, a.c, depth ? groups * ea.kept : ea.kept, eb.kept, a.alpha, a.beta, device));
  if (depth && a.c.given()) DIPTYCH_TRY(shaped("c", a.c, {groups, ea.kept, eb.kept}));
  DIPTYCH_TRY(options(kOp, a.options, a.a, a.b));
  const int64_t need =
      grouped_gemm_workspace_bytes(a.a.format, a.b.format, a.kind, ea.kept, eb.kept, ea.reduced, groups);
  DIPTYCH_TRY(workspace(kOp, a.workspace, need, device, operands(a)));
  return all_apart(kOp, operands(a));
}

Status check(const GroupedBiasGradArgs& a, const Device& device) {
  constexpr const char* op = "grouped_bias_grad";
  const auto refuse = [&](const char* arg, const char* form, const TensorView& t) {
    return Status(Code::shape, std::string(op) + ": " + arg + " must be " + form + ", got " + describe(t));
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
  DIPTYCH_TRY(workspace(op, a.workspace, need, device, operands(a)));
  return all_apart(op, operands(a));
}

}  // namespace diptych
