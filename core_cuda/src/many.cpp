// quantize_many and quantize_stack one by one, where no kernel takes the calls together, and when quantize_many saves
// time.
#include "diptych/many.h"

#include "contracts/contracts.h"
#include "registry.h"

namespace diptych {

Status quantize_each(const QuantizeManyArgs& a, const Execution& exec) {
  for (const QuantizeArgs& one : a.each) DIPTYCH_TRY(quantize(one, exec));
  return {};
}

Status quantize_slices(const QuantizeStackArgs& args, const Execution& exec) {
  const QuantizeArgs& a = args.stack;
  bool writes = false;  // if all outputs are empty, G may be huge: do not loop over it
  for (const TensorView* t : {&a.amax, &a.columnwise_amax, &a.rowwise.data, &a.rowwise.scale_inv, &a.columnwise.data,
                              &a.columnwise.scale_inv})
    writes |= t->given() && t->numel() > 0;
  for (int64_t g = 0; writes && g < a.x.shape[0]; ++g) DIPTYCH_TRY(quantize(slice(a, g), exec));
  return {};
}

bool together(const QuantizeManyArgs& a, const Device& device) {
  constexpr int64_t kSmall = 1 << 22;  // elements of all tensors
  int64_t elements = 0;
  for (const QuantizeArgs& one : a.each) elements += one.x.numel();
  return elements <= kSmall && check(a, device).ok() && runs_together(a, device);
}

}  // namespace diptych
