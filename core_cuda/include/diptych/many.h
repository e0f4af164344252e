// One op on many tensors at once, such as all weights of a model. Each call gives the bits that it gives alone.
#pragma once

#include <vector>

#include "diptych/quantize.h"
#include "diptych/scale_update.h"

namespace diptych {

// Independent calls of one op: no call touches memory that another one writes.
template <typename Args>
struct Many {
  std::vector<Args> each;  // at least one
};

// Calls f with each tensor of the arguments and its role.
template <typename Args, typename F>
void fields(Many<Args>& a, F&& f) {
  for (Args& one : a.each) fields(one, f);
}

using QuantizeManyArgs = Many<QuantizeArgs>;  // plain inputs of one dtype with equal options; no column_sum
using ScaleUpdateManyArgs = Many<ScaleUpdateArgs>;

DIPTYCH_OP(quantize_many, QuantizeManyArgs)

// Whether quantize_many takes these calls, has a kernel that runs them together, and saves time by that: the tensors
// are so small that launches cost more than the work.
bool together(const QuantizeManyArgs&, const Device&);
DIPTYCH_OP(scale_update_many, ScaleUpdateManyArgs)

}  // namespace diptych
