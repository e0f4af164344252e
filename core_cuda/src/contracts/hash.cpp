// Contract of hash.
#include "diptych/hash.h"

#include "contracts/parts.h"

namespace diptych {

using namespace contract;

Status check(const HashArgs& a, const Device& device) {
  constexpr const char* op = "hash";
  DIPTYCH_TRY(present(op, "x", a.x, device));
  DIPTYCH_TRY(holds(op, "out", a.out, DType::i32, 4, device));
  if (reinterpret_cast<uintptr_t>(a.out.data) % 8 != 0)
    return {Code::value, std::string(op) + ": out " + describe(a.out) + " is not aligned to 8 bytes"};
  return all_apart(op, operands(a));
}

}  // namespace diptych
