// activation and activation_grad: the values that a source computes for quantize, rounded to the output's type.
#include "cuda/base/launch.cuh"
#include "cuda/source/lanes.cuh"
#include "diptych/activation.h"

namespace diptych::cuda {
namespace {

constexpr int kRows = 4;  // rows of a thread

struct StoreArgs {
  SourceArgs in;
  Lanes lanes;
  Elements out;
  bool vec;  // aligned to 16 bytes, and so are its rows
};

template <typename In>
__global__ void __launch_bounds__(kLaneThreads, kTypedGrad<In> ? 2 : 3)
    store_kernel(const __grid_constant__ StoreArgs p) {
  const int64_t first = p.lanes.col(), row0 = p.lanes.row();
  const int down = p.lanes.down();
  if (first >= p.lanes.cols) return;
  const auto store = [&](int i, int64_t col, const Floats8& y) {
    const int64_t row = row0 + i * down, left = p.in.k - col;
    if (row < p.in.m && left > 0) {
      store8(p.out, row * p.in.k + col, left < 8 ? static_cast<int>(left) : 8, p.vec, y);
    }
  };
  if constexpr (kTyped<In>) {
    const Reader<In, true> source(p.in, row0, first, down);
    each_row<kRows>(source, [&](int i, const auto& raw) {
      if constexpr (kTypedGrad<In>) {
        Floats8 y[2];
        source.both(raw, y);
        store(i, first, y[0]);
        if (p.in.gated) store(i, first + p.in.f, y[1]);
      } else {
        store(i, first, source.values(i, raw));
      }
    });
  } else {
    const Reader<In> source(p.in, row0, first, down);
#pragma unroll 1
    for (int i = 0; i < kRows; ++i) store(i, first, source.values(i, {}));
  }
}

Status round_into(const char* op, const TensorView& x, const Source& s, const TensorView& out, const Execution& exec) {
  StoreArgs p{source_args(x, s), {}, Elements(out), false};
  if (p.in.m == 0 || p.in.k == 0) return {};
  p.vec = p.in.k % 8 == 0 && aligned(out.data, 16);
  return with_any_source(p.in, [&](auto type) {
    using In = decltype(type);
    if constexpr (kTypedNorm<In>) {
      return Status(Code::unsupported, std::string(op) + ": norms are stored by the norm kernels");  // never reached
    } else {
      p.lanes = lanes_of<In>(p.in, kRows, 0);
      return launch(op, store_kernel<In>, p.lanes.blocks, kLaneThreads, 0, exec.stream, p);
    }
  });
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
