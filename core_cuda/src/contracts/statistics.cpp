// Contract of statistics.
#include "diptych/statistics.h"

#include "contracts/parts.h"

namespace diptych {

using namespace contract;

Status check(const StatisticsArgs& a, const Device& device) {
  constexpr const char* op = "statistics";
  if (!valid(a.number))
    return {Code::value, std::string(op) + ": unknown number " + std::to_string(static_cast<int32_t>(a.number))};
  DIPTYCH_TRY(present(op, "x", a.x, device));
  const NumberRow& number = row(a.number);
  const int64_t size = a.x.numel() * bytes(a.x.dtype);
  if (size % number.bytes != 0)
    return {Code::shape, std::string(op) + ": x " + describe(a.x) + " holds no whole elements of " + number.name};
  if (reinterpret_cast<uintptr_t>(a.x.data) % static_cast<size_t>(number.bytes) != 0)
    return {Code::value, std::string(op) + ": x " + describe(a.x) + " is not aligned to elements of " + number.name};
  if (a.result.given() || a.largest.given()) {
    if (a.number != Number::f32 && a.number != Number::bf16 && a.number != Number::f16)
      return {Code::type,
              std::string(op) + ": x was rounded, and must be float32, bfloat16 or float16, got " + number.name};
    DIPTYCH_TRY(floats(op, "result", a.result, size / number.bytes, device));
    DIPTYCH_TRY(floats(op, "largest", a.largest, size / number.bytes, device));
  }
  DIPTYCH_TRY(holds(op, "out", a.out, DType::i32, a.result.given() ? 18 : 14, device));
  if (reinterpret_cast<uintptr_t>(a.out.data) % 8 != 0)
    return {Code::value, std::string(op) + ": out " + describe(a.out) + " is not aligned to 8 bytes"};
  DIPTYCH_TRY(workspace(op, a.workspace, kStatisticsWorkspace, device, operands(a)));
  return all_apart(op, operands(a));
}

}  // namespace diptych
