// layernorm and rmsnorm: statistics in two passes over a row in cache, their gradients in one pass over the tensor.
#include "diptych/norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/base/run.h"
#include "cpu/base/scratch.h"
#include "cpu/isa/isa.h"
#include "cpu/source/source.h"

namespace diptych::cpu {
namespace {

char* row_of(const TensorView& t, int64_t r) { return t.as<char>() + r * t.cols() * bytes(t.dtype); }

Status run(const NormArgs& a) {
  const Kernels& simd = kernels();
  const int64_t m = a.x.rows(), k = a.x.cols();
  const std::vector<float> g = gamma_of(simd, a.gamma, a.zero_centered_gamma), beta = as_floats(simd, a.beta);
  const float count = static_cast<float>(std::max<int64_t>(k, 1));
  const int64_t rows = std::max<int64_t>(1, kThreadedElements / 4 / std::max<int64_t>(k, 1));  // rows of a task
  for_tasks(ceil_div(m, rows), m * k >= kThreadedElements, [&](int64_t task) {
    float* x = scratch(Slot::tile).get<float>(k);
    for (int64_t r = task * rows; r < std::min(m, (task + 1) * rows); ++r) {
      simd.load(a.x.dtype, row_of(a.x, r), k, x);
      const float mu = a.norm == Norm::layernorm ? simd.fused.sum(x, k) / count : 0.0f;
      const float rsigma = 1.0f / std::sqrt(simd.fused.squares(x, mu, k) / count + a.eps);
      if (a.norm == Norm::layernorm) a.mu.as<float>()[r] = mu;
      a.rsigma.as<float>()[r] = rsigma;
      if (!a.y.given()) continue;
      simd.fused.normalize({g.data(), beta.empty() ? nullptr : beta.data(), mu, rsigma}, x, k, x);
      simd.store(a.y.dtype, x, k, row_of(a.y, r));
    }
  });
  return {};
}

// A task takes a chunk of rows (kSumChunk) and sums it; then the chunks' sums are added.
Status run(const NormGradArgs& a) {
  const Kernels& simd = kernels();
  const int64_t m = a.x.rows(), k = a.x.cols(), chunks = ceil_div(m, kSumChunk);
  if (k == 0) return {};
  const bool centered = a.norm == Norm::layernorm, with_beta = a.dbeta.given();
  const std::vector<float> g = gamma_of(simd, a.gamma, a.zero_centered_gamma);
  std::vector<float> dgamma(chunks * k), dbeta(with_beta ? chunks * k : 0);
  for_tasks(chunks, m * k >= kThreadedElements, [&](int64_t chunk) {
    float *x = scratch(Slot::tile).get<float>(2 * k), *dy = x + k;
    for (int64_t r = chunk * kSumChunk; r < std::min(m, (chunk + 1) * kSumChunk); ++r) {
      simd.load(a.x.dtype, row_of(a.x, r), k, x);
      simd.load(a.dy.dtype, row_of(a.dy, r), k, dy);
      const NormRow row{g.data(), nullptr, centered ? a.mu.as<const float>()[r] : 0.0f, a.rsigma.as<const float>()[r]};
      simd.fused.norm_grad(row, centered, dy, x, k, dy, dgamma.data() + chunk * k,
                           with_beta ? dbeta.data() + chunk * k : nullptr);
      simd.store(a.dx.dtype, dy, k, row_of(a.dx, r));
    }
  });
  const auto join = [&](const std::vector<float>& part, const TensorView& out) {
    std::vector<float> acc(k);
    simd.column_sum(DType::f32, part.data(), k, chunks, k, acc.data());
    simd.store(out.dtype, acc.data(), k, out.data);
  };
  join(dgamma, a.dgamma);
  if (with_beta) join(dbeta, a.dbeta);
  return {};
}

}  // namespace

Status norm(const NormArgs& args, const Execution&) {
  return guarded("norm", [&] { return run(args); });
}

Status norm_grad(const NormGradArgs& args, const Execution&) {
  return guarded("norm_grad", [&] { return run(args); });
}

}  // namespace diptych::cpu
