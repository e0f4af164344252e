// Stacks: G tensors of one shape in one buffer, such as the weights of a layer's experts. A leading G stands before
// each tensor's own shape, also where that is [1] and otherwise not written.
#pragma once

#include "diptych/ops.h"

namespace diptych {

// Tensor g of a stack.
inline TensorView slice(const TensorView& stack, int64_t g) {
  TensorView t = stack;
  if (!stack.given()) return t;
  t.rank = stack.rank > 1 ? stack.rank - 1 : 1;
  int64_t n = bytes(stack.dtype);
  for (int i = 0; i < t.rank; ++i) n *= t.shape[i] = i + 1 < stack.rank ? stack.shape[i + 1] : 1;
  if (t.data != nullptr) t.data = t.as<char>() + g * n;
  return t;
}

inline QuantizedView slice(const QuantizedView& stack, int64_t g) {
  return {stack.format, stack.columnwise, slice(stack.data, g), slice(stack.scale_inv, g), slice(stack.amax, g)};
}

// quantize for each tensor of a stack: x [G, ..., K], and a leading G in every other argument, outputs and `rng` too.
// No source, no column_sum.
Status quantize_stack(const QuantizeArgs&, const Execution&);

}  // namespace diptych
