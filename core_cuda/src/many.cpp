// Runs the calls of quantize_many one by one, where no kernel takes them together.
#include "diptych/many.h"

#include "registry.h"

namespace diptych {

Status quantize_each(const QuantizeManyArgs& a, const Execution& exec) {
  for (const QuantizeArgs& one : a.each) DIPTYCH_TRY(quantize(one, exec));
  return {};
}

}  // namespace diptych
