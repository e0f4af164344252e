// activation and activation_grad: the values that a source computes for quantize, rounded to the output's type.
#include "diptych/activation.h"

#include <algorithm>

#include "cpu/base/run.h"
#include "cpu/isa/isa.h"
#include "cpu/source/source.h"

namespace diptych::cpu {
namespace {

Status round_into(const Input& in, const TensorView& out) {
  if (in.m == 0 || in.k == 0) return {};  // the other extent may be huge
  constexpr int64_t kPart = 2048;
  const Kernels& simd = kernels();
  const int64_t across = ceil_div(in.k, kPart),
                rows = std::max<int64_t>(1, kThreadedElements / 4 / std::max<int64_t>(in.k, 1));
  for_tasks(ceil_div(in.m, rows), in.m * in.k >= kThreadedElements, [&](int64_t task) {
    alignas(64) float part[kPart];
    for (int64_t r = task * rows; r < std::min(in.m, (task + 1) * rows); ++r)
      for (int64_t i = 0; i < across; ++i) {
        const int64_t c0 = i * kPart, cols = std::min(kPart, in.k - c0);
        in.stage(r, 1, c0, cols, reinterpret_cast<char*>(part), kPart);
        simd.store(out.dtype, part, cols, out.as<char>() + (r * in.k + c0) * bytes(out.dtype));
      }
  });
  return {};
}

}  // namespace

Status activation(const ActivationArgs& args, const Execution&) {
  return guarded("activation", [&] {
    Source s;
    s.kind = SourceKind::activation;
    s.activation = args.kind;
    s.gated = args.gated;
    return round_into(Input(args.x, s), args.y);
  });
}

Status activation_grad(const ActivationGradArgs& args, const Execution&) {
  return guarded("activation_grad", [&] {
    Source s;
    s.kind = SourceKind::activation_grad;
    s.activation = args.kind;
    s.gated = args.gated;
    s.dy = args.dy;
    return round_into(Input(args.x, s), args.dx);
  });
}

}  // namespace diptych::cpu
