// quantize_many one by one, where no kernel takes the calls together, and when it saves time.
#include "diptych/many.h"

#include "contracts/contracts.h"
#include "registry.h"

namespace diptych {

Status quantize_each(const QuantizeManyArgs& a, const Execution& exec) {
  for (const QuantizeArgs& one : a.each) DIPTYCH_TRY(quantize(one, exec));
  return {};
}

bool together(const QuantizeManyArgs& a, const Device& device) {
  constexpr int64_t kSmall = 1 << 22;  // elements of all tensors
  int64_t elements = 0;
  for (const QuantizeArgs& one : a.each) elements += one.x.numel();
  return elements <= kSmall && check(a, device).ok() && runs_together(a, device);
}

}  // namespace diptych
