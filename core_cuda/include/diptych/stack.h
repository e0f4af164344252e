// Stacks: G tensors of one shape in one buffer, such as the weights of a layer's experts. A leading G stands before
// each tensor's own shape, also where that is [1] and otherwise not written.
#pragma once

#include "diptych/quantize.h"

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

// Tensors first .. first + count - 1 of a stack, as one.
inline TensorView slice(const TensorView& stack, int64_t first, int64_t count) {
  TensorView t = stack;
  if (!stack.given()) return t;
  t.data = slice(stack, first).data;
  t.shape[0] = count;
  return t;
}

// The same of all that a stack's arguments name; `at`: one or two numbers.
template <typename... At>
QuantizedView slice(const QuantizedView& stack, At... at) {
  return {stack.format, stack.columnwise, slice(stack.data, at...), slice(stack.scale_inv, at...),
          slice(stack.amax, at...)};
}
template <typename... At>
QuantizeArgs slice(const QuantizeArgs& stack, At... at) {
  QuantizeArgs a = stack;
  for (TensorView* t : {&a.x, &a.amax, &a.columnwise_amax, &a.scale, &a.rng}) *t = slice(*t, at...);
  a.rowwise = slice(a.rowwise, at...), a.columnwise = slice(a.columnwise, at...);
  return a;
}

// quantize for each tensor of a stack: x [G, ..., K], and a leading G in every other argument, outputs and `rng` too.
// No source, no column_sum.
Status quantize_stack(const QuantizeArgs&, const Execution&);

}  // namespace diptych
