// activation and activation_grad: the values that a source computes for quantize, rounded to the output's type.
#include "cuda/fused/source.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 256;

// A thread stores eight neighbours of a row.
__global__ void __launch_bounds__(kThreads)
    store_kernel(const __grid_constant__ SourceArgs p, int64_t groups, bool vec, Elements out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, row = i / groups;
  if (row >= p.m) return;
  const int64_t col = i % groups * 8, left = p.k - col;
  store8(out, row * p.k + col, left < 8 ? static_cast<int>(left) : 8, vec, source8(p, row, col));
}

Status round_into(const char* op, const TensorView& x, const Source& s, const TensorView& out, const Execution& exec) {
  const SourceArgs p = source_args(x, s);
  if (p.m == 0 || p.k == 0) return {};
  const int64_t groups = ceil_div(p.k, 8);
  return launch(op, store_kernel, ceil_div(p.m * groups, kThreads), kThreads, 0, exec.stream, p, groups,
                p.k % 8 == 0 && aligned(out.data, 16), Elements(out));
}

}  // namespace

Status activation(const ActivationArgs& args, const Execution& exec) {
  Source s;
  s.kind = SourceKind::activation, s.activation = args.kind, s.gated = args.gated;
  return round_into("activation", args.x, s, args.y, exec);
}

Status activation_grad(const ActivationGradArgs& args, const Execution& exec) {
  Source s;
  s.kind = SourceKind::activation_grad, s.activation = args.kind, s.gated = args.gated, s.dy = args.dy;
  return round_into("activation_grad", args.x, s, args.dx, exec);
}

}  // namespace diptych::cuda
