// unpermute and unpermute_grad: sums over a token's rows, and their gradients. float64 rows are summed in float64, all
// others in float32.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cpu/base/run.h"
#include "cpu/isa/isa.h"
#include "cpu/permute/permute.h"
#include "diptych/permute.h"

namespace diptych::cpu {
namespace {

constexpr int64_t kStrip = 1024;  // elements; sums and a row's part stay in the first-level cache
constexpr int kLanes = 16;        // interleaved sums of a dot product

// Reads the numbers of a tensor as A, float or double.
template <typename A>
struct Reader {
  explicit Reader(const TensorView& t) : data(t.as<const char>()), dtype(t.dtype), size(bytes(t.dtype)) {}
  // Returns n numbers from i on: in place if they are A, else converted into `to`.
  const A* operator()(int64_t i, int64_t n, A* to) const {
    const char* from = data + i * size;
    if constexpr (std::is_same_v<A, float>) {
      if (dtype == DType::f32) return reinterpret_cast<const float*>(from);
      kernels().load(dtype, from, n, to);
      return to;
    } else {
      if (dtype == DType::f64) return reinterpret_cast<const double*>(from);
      float part[kStrip];
      kernels().load(dtype, from, n, part);
      for (int64_t j = 0; j < n; ++j) to[j] = part[j];
      return to;
    }
  }
  A at(int64_t i) const {
    A v;
    return *(*this)(i, 1, &v);
  }
  const char* data;
  DType dtype;
  int64_t size;
};

template <typename A>
void write(const TensorView& t, int64_t i, int64_t n, const A* from) {
  char* to = t.as<char>() + i * bytes(t.dtype);
  if constexpr (std::is_same_v<A, double>) {
    if (t.dtype == DType::f64) {
      std::memcpy(to, from, n * sizeof(double));
    } else {
      float part[kStrip];
      for (int64_t j = 0; j < n; ++j) part[j] = static_cast<float>(from[j]);
      kernels().store(t.dtype, part, n, to);
    }
  } else {
    kernels().store(t.dtype, from, n, to);
  }
}

// Calls body(first token, end token) in tasks.
template <typename Body>
void for_tokens(int64_t tokens, int64_t work, Body body) {
  if (work == 0) return;  // nothing is written, however many tokens there are: do not loop over them
  const int64_t step = std::max<int64_t>(1, (kThreadedElements * tokens) / std::max<int64_t>(1, work));
  for_tasks(ceil_div(tokens, step), work >= kThreadedElements,
            [&](int64_t task) { body(task * step, std::min(tokens, (task + 1) * step)); });
}

// Computes y[t] from a token's rows and their factors.
void sum_rows(const UnpermuteArgs& a, int64_t t, const std::vector<const void*>& rows, const std::vector<float>& by) {
  const int64_t width = a.x.cols();
  kernels().sum_rows(a.x.dtype, rows.data(), by.data(), static_cast<int64_t>(rows.size()), width,
                     a.y.as<char>() + t * width * bytes(a.x.dtype));
}
void sum_rows(const UnpermuteArgs& a, int64_t t, const std::vector<const void*>& rows, const std::vector<double>& by) {
  const int64_t width = a.x.cols();
  for (int64_t c = 0; c < width; c += kStrip) {
    const int64_t n = std::min(kStrip, width - c);
    double* acc = a.y.as<double>() + t * width + c;
    std::fill_n(acc, n, 0.0);
    for (size_t r = 0; r < rows.size(); ++r)
      for (int64_t i = 0; i < n; ++i) acc[i] += by[r] * static_cast<const double*>(rows[r])[c + i];
  }
}

template <typename A>
void unpermute_as(const UnpermuteArgs& a) {
  const int64_t tokens = a.row_id_map.rows(), slots = a.row_id_map.cols(), rows = a.x.rows(), width = a.x.cols();
  const auto* map = a.row_id_map.as<const int32_t>();
  const Reader<A> probs(a.probs);
  const int64_t grad_size = a.dprobs.given() ? bytes(a.dprobs.dtype) : 0;
  for_tokens(tokens, rows * width + tokens * (width + slots), [&](int64_t first, int64_t last) {
    std::vector<Destination> to;
    std::vector<const void*> from;
    std::vector<A> by;
    for (int64_t t = first; t < last; ++t) {
      destinations(map + t * slots, slots, rows, to);
      from.clear(), by.clear();
      for (const Destination& d : to) {
        from.push_back(a.x.as<const char>() + d.row * width * bytes(a.x.dtype));
        by.push_back(a.probs.given() ? probs.at(t * slots + d.slot) : A{1});
      }
      sum_rows(a, t, from, by);
      if (!grad_size) continue;
      char* grads = a.dprobs.as<char>() + t * slots * grad_size;
      if (slots > 0) std::memset(grads, 0, slots * grad_size);
      for (const Destination& d : to)
        std::memcpy(grads + d.slot * grad_size, a.permuted_dprobs.as<const char>() + d.row * grad_size, grad_size);
    }
  });
}

template <typename A>
void unpermute_grad_as(const UnpermuteGradArgs& a) {
  const int64_t tokens = a.row_id_map.rows(), slots = a.row_id_map.cols(), rows = a.row_source.numel();
  const int64_t width = a.dy.cols();
  const auto *map = a.row_id_map.as<const int32_t>(), *row_source = a.row_source.as<const int32_t>();
  const Reader<A> dy(a.dy), x(a.x), probs(a.probs);
  for_tokens(tokens, rows * width + tokens * (width + slots), [&](int64_t first, int64_t last) {
    std::vector<Destination> to;
    std::vector<A> dots;
    alignas(64) A grad[kStrip], part[kStrip], scaled[kStrip];
    for (int64_t t = first; t < last; ++t) {
      destinations(map + t * slots, slots, rows, to);
      dots.assign(to.size() * kLanes, A{0});
      for (int64_t c = 0; c < width; c += kStrip) {
        const int64_t n = std::min(kStrip, width - c);
        const A* g = dy(t * width + c, n, grad);
        for (size_t j = 0; j < to.size(); ++j) {
          const A p = probs.at(t * slots + to[j].slot);
          for (int64_t i = 0; i < n; ++i) scaled[i] = p * g[i];
          write(a.dx, to[j].row * width + c, n, scaled);
          if (!a.dprobs.given()) continue;
          const A* row = x(to[j].row * width + c, n, part);
          A* dot = &dots[j * kLanes];
          int64_t i = 0;
          for (; i + kLanes <= n; i += kLanes)
            for (int l = 0; l < kLanes; ++l) dot[l] += row[i + l] * g[i + l];
          for (; i < n; ++i) dot[i % kLanes] += row[i] * g[i];
        }
      }
      if (!a.dprobs.given()) continue;
      const int64_t size = bytes(a.dprobs.dtype);
      if (slots > 0) std::memset(a.dprobs.as<char>() + t * slots * size, 0, slots * size);
      for (size_t j = 0; j < to.size(); ++j) {
        A sum = 0;
        for (int l = 0; l < kLanes; ++l) sum += dots[j * kLanes + l];
        write(a.dprobs, t * slots + to[j].slot, 1, &sum);
      }
    }
  });
  const int64_t row_bytes = width * bytes(a.dx.dtype);
  if (row_bytes == 0) return;
  constexpr int64_t kRows = 1 << 10;
  for_tasks(ceil_div(rows, kRows), rows * width >= kThreadedElements, [&](int64_t task) {
    for (int64_t r = task * kRows; r < std::min(rows, (task + 1) * kRows); ++r)
      if (row_source[r] < 0) std::memset(a.dx.as<char>() + r * row_bytes, 0, row_bytes);
  });
}

}  // namespace

Status unpermute(const UnpermuteArgs& a, const Execution&) {
  return guarded("unpermute", [&] {
    a.x.dtype == DType::f64 ? unpermute_as<double>(a) : unpermute_as<float>(a);
    return Status();
  });
}

Status unpermute_grad(const UnpermuteGradArgs& a, const Execution&) {
  return guarded("unpermute_grad", [&] {
    a.dy.dtype == DType::f64 ? unpermute_grad_as<double>(a) : unpermute_grad_as<float>(a);
    return Status();
  });
}

}  // namespace diptych::cpu
