// A tensor as a test passes it (Tensor in tests/core/simulation.py).
#pragma once

#include <algorithm>

#include "diptych/tensor.h"

namespace simulated {

struct Tensor {
  void* data;
  int32_t dtype, rank, given;
  int64_t shape[3];
};

inline diptych::TensorView view(const Tensor& t) {
  diptych::TensorView v;
  if (!t.given) return v;
  v.data = t.data, v.dtype = static_cast<diptych::DType>(t.dtype), v.rank = t.rank;
  v.device = {diptych::Backend::cuda, 0};
  std::copy_n(t.shape, t.rank, v.shape);
  return v;
}

}  // namespace simulated
