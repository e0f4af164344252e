// Delayed scaling's update of a history of amaxes and of the scale that follows from it (NUMERICS 2).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/kernels.h"
#include "cpu/run.h"

namespace diptych::cpu {
namespace {

float next_scale(float amax, float top, float old) {
  if (!(amax > 0.0f && std::isfinite(amax))) return old;
  return std::min(top / amax, std::numeric_limits<float>::max());
}

// One tensor. `to` may be `from`; element i is read before anything lands on it.
void update(const ScaleUpdateArgs& a, int64_t t, int64_t length, float top) {
  const float* from = a.history.as<const float>() + t * length;
  float* to = a.new_history.as<float>() + t * length;
  const float old = a.scale.as<const float>()[t];
  const float reduced = a.reduced.given() ? a.reduced.as<const float>()[t] : 0.0f;
  const float last = reduced != 0.0f ? reduced : from[0];
  if (last == 0.0f) {
    std::memmove(to, from, length * sizeof(float));
    a.new_scale.as<float>()[t] = old;
    return;
  }
  float amax = last;
  if (a.amax.given()) {
    amax = a.amax.as<const float>()[t];
  } else if (!a.most_recent) {
    for (int64_t i = 1; i < length; ++i) amax = std::fmax(amax, from[i]);  // passes NaN over
  }
  std::memmove(to, from + 1, (length - 1) * sizeof(float));
  to[length - 1] = last;
  to[0] = 0.0f;  // in a history of one entry, this is the entry
  a.new_scale.as<float>()[t] = next_scale(amax, top, old);
}

// Outputs as the inputs are; where they are the inputs, nothing is written.
void keep(const TensorView& from, const TensorView& to) {
  if (to.data != from.data && from.numel() > 0) std::memcpy(to.data, from.data, from.numel() * sizeof(float));
}

}  // namespace

Status scale_update(const ScaleUpdateArgs& args, const Execution&) {
  return guarded("scale_update", [&] {
    if (args.seen.given() && *args.seen.as<const int64_t>() == *args.step.as<const int64_t>()) {
      keep(args.history, args.new_history);
      keep(args.scale, args.new_scale);
      return Status();
    }
    const int64_t n = args.history.rows(), length = args.history.cols();
    const float top = args.fp8_max * std::ldexp(1.0f, -args.margin);
    for_tasks(n, n * length >= kThreadedElements, [&](int64_t t) { update(args, t, length, top); });
    return Status();
  });
}

}  // namespace diptych::cpu
