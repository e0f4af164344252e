// Contract of transpose.
#include "diptych/transpose.h"

#include <algorithm>
#include <utility>

#include "contracts/parts.h"

namespace diptych {

using namespace contract;

Status check(const TransposeArgs& a, const Device& device) {
  constexpr const char* op = "transpose";
  DIPTYCH_TRY(present(op, "in", a.in, device));
  if (a.in.rank < 2)
    return {Code::shape, std::string(op) + ": in must have two dimensions or more, got " + describe(a.in)};
  if (bytes(a.in.dtype) != 1)
    return {Code::type, std::string(op) + ": in must have elements of one byte, got " + describe(a.in)};
  DIPTYCH_TRY(present(op, "out", a.out, device));
  DIPTYCH_TRY(of_dtype(op, "out", a.out, a.in.dtype));
  TensorView want = a.in;
  std::swap(want.shape[want.rank - 2], want.shape[want.rank - 1]);
  if (a.out.rank != want.rank || !std::equal(want.shape, want.shape + want.rank, a.out.shape))
    return {Code::shape, std::string(op) + ": out must be " + describe(want) + ", got " + describe(a.out)};
  return all_apart(op, operands(a));
}

}  // namespace diptych
