// Stacks: G tensors of one shape in one buffer, such as the weights of a layer's experts. A stack's shape is G followed
// by the shape of one tensor; where that shape is [1], the stack's is [G].
#pragma once

#include "diptych/quantize.h"

namespace diptych {

// Returns tensor g of a stack.
inline TensorView slice(const TensorView& stack, int64_t g) {
  TensorView t = stack;
  if (!stack.given()) return t;
  t.rank = stack.rank > 1 ? stack.rank - 1 : 1;
  int64_t n = bytes(stack.dtype);
  for (int i = 0; i < t.rank; ++i) n *= t.shape[i] = i + 1 < stack.rank ? stack.shape[i + 1] : 1;
  if (t.data != nullptr) t.data = t.as<char>() + g * n;
  return t;
}

// Returns tensors first .. first + count - 1 of a stack, as a stack.
inline TensorView slice(const TensorView& stack, int64_t first, int64_t count) {
  TensorView t = stack;
  if (!stack.given()) return t;
  t.data = slice(stack, first).data;
  t.shape[0] = count;
  return t;
}

// Returns the same slice of every tensor of a stack's arguments. `at`: g, or first and count.
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

// Quantizes each tensor of a stack x [G, ..., K]. Every other argument has a leading G too, including outputs and
// `rng`. Takes no source and no column_sum.
struct QuantizeStackArgs {
  QuantizeArgs stack;
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(QuantizeStackArgs& a, F&& f) {
  fields(a.stack, f);
}

DIPTYCH_OP(quantize_stack, QuantizeStackArgs)

}  // namespace diptych
