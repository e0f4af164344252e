#include "cpu/source/source.h"

#include <algorithm>
#include <cstring>

#include "cpu/base/run.h"

namespace diptych::cpu {
namespace {

constexpr int64_t kPart = 1024;  // elements computed at a time, in the first-level cache

const char* element(const TensorView& t, int64_t at) { return t.as<const char>() + at * bytes(t.dtype); }

}  // namespace

std::vector<float> as_floats(const Kernels& simd, const TensorView& t) {
  if (!t.given()) return {};
  std::vector<float> out(t.numel());
  simd.load(t.dtype, t.data, t.numel(), out.data());
  return out;
}

std::vector<float> gamma_of(const Kernels& simd, const TensorView& gamma, bool zero_centered) {
  std::vector<float> g = as_floats(simd, gamma);
  if (zero_centered) simd.fused.add_one(g.data(), static_cast<int64_t>(g.size()));
  return g;
}

Input::Input(const TensorView& tensor, const Source& source)
    : m(encoded_extent(tensor, source).rows),
      k(encoded_extent(tensor, source).cols),
      dtype(source.kind == SourceKind::plain || source.kind == SourceKind::permuted ? tensor.dtype : DType::f32),
      staged(source.kind != SourceKind::plain),
      x(tensor),
      simd_(kernels()),
      source_(source),
      g_(gamma_of(simd_, source.gamma, source.zero_centered_gamma)),
      beta_(as_floats(simd_, source.beta)) {}

int64_t Input::origin(int64_t r) const {
  const int32_t entry = source_.row_source.as<const int32_t>()[r];
  const int64_t from = entry < 0 ? -1 : entry / std::max<int64_t>(1, source_.row_id_map.cols());
  return from < x.rows() ? from : -1;
}

std::vector<char> Input::used() const {
  std::vector<char> rows;
  if (source_.kind != SourceKind::permuted) return rows;
  rows.assign(x.rows(), 0);
  for (int64_t r = 0; r < m; ++r)
    if (const int64_t from = origin(r); from >= 0) rows[from] = 1;
  return rows;
}

void Input::stage(int64_t r0, int64_t rows, int64_t c0, int64_t cols, char* to, int64_t ld) const {
  const int64_t size = bytes(dtype);
  if (!staged) return simd_.gather(element(x, r0 * k + c0), k * size, rows, cols * size, to, ld * size);
  if (source_.kind == SourceKind::permuted) {
    constexpr int64_t kAhead = 2, kHead = 1024;  // rows to prefetch ahead; first bytes of a row, before the hardware
                                                 // prefetcher detects the stream
    for (int64_t r = r0; r < r0 + rows; ++r, to += ld * size) {
      const int64_t from = origin(r), next = r + kAhead < m ? origin(r + kAhead) : -1;
      for (int64_t b = 0; b < std::min(cols * size, kHead) && next >= 0; b += 64)
        __builtin_prefetch(element(x, next * k + c0) + b, 0, 2);
      if (from >= 0) {
        std::memcpy(to, element(x, from * k + c0), cols * size);
      } else {
        std::memset(to, 0, cols * size);
      }
    }
    return;
  }
  for (int64_t r = r0; r < r0 + rows; ++r, to += ld * sizeof(float)) compute(r, c0, cols, reinterpret_cast<float*>(to));
}

void Input::compute(int64_t r, int64_t c0, int64_t cols, float* to) const {
  const Source& s = source_;
  const int64_t f = s.gated ? x.cols() / 2 : k;  // the column where b, the gate, starts
  alignas(64) float dy[kPart], a[kPart], b[kPart];
  const auto load = [&](const TensorView& t, int64_t at, int64_t n, float* out) {
    simd_.load(t.dtype, element(t, at), n, out);
    return out;
  };
  for (int64_t c = c0, n; c < c0 + cols; c += n, to += n) {
    n = std::min(kPart, c0 + cols - c);
    const int64_t at = r * x.cols() + c;
    if (s.kind == SourceKind::norm) {
      const NormRow row{g_.data() + c, beta_.empty() ? nullptr : beta_.data() + c,
                        s.norm == Norm::layernorm ? s.mu.as<const float>()[r] : 0.0f, s.rsigma.as<const float>()[r]};
      simd_.fused.normalize(row, load(x, at, n, a), n, to);
    } else if (s.kind == SourceKind::activation) {
      load(x, at, n, a);
      simd_.fused.activation(s.activation, a, s.gated ? load(x, at + f, n, b) : nullptr, n, to);
    } else {
      // The gradient of a comes first, then that of b; a part lies in only one of them.
      const bool second = c >= f;
      if (!second) n = std::min(n, f - c);
      const int64_t col = second ? c - f : c;
      load(s.dy, r * f + col, n, dy);
      load(x, r * x.cols() + col, n, a);
      if (second) {
        simd_.fused.activation_grad(s.activation, dy, a, nullptr, n, nullptr, to);
      } else {
        simd_.fused.activation_grad(s.activation, dy, a, s.gated ? load(x, at + f, n, b) : nullptr, n, to, nullptr);
      }
    }
  }
}

// Tasks divide columns and chunks; the sum of a chunk does not depend on the division.
void column_sums(const Input& in, const TensorView& out) {
  constexpr int64_t kStrip = 512, kRows = 16;
  const Kernels& simd = kernels();
  const int64_t chunks = ceil_div(in.m, kSumChunk), strips = ceil_div(in.k, kStrip);
  const bool threaded = in.m * in.k >= kThreadedElements;
  std::vector<float> part(chunks * in.k);
  for_tasks(chunks * strips, threaded, [&](int64_t i) {
    const int64_t c0 = i % strips * kStrip, cols = std::min(kStrip, in.k - c0);
    const int64_t r0 = i / strips * kSumChunk, end = std::min(in.m, r0 + kSumChunk);
    float* acc = part.data() + i / strips * in.k + c0;
    alignas(64) float staged[kRows * kStrip];
    for (int64_t r = r0; r < end; r += kRows) {
      const int64_t rows = std::min(kRows, end - r);
      in.stage(r, rows, c0, cols, reinterpret_cast<char*>(staged), kStrip);
      simd.column_sum(in.dtype, staged, kStrip, rows, cols, acc);
    }
  });
  for_tasks(strips, threaded, [&](int64_t i) {
    const int64_t c0 = i * kStrip, cols = std::min(kStrip, in.k - c0);
    alignas(64) float acc[kStrip];
    std::memset(acc, 0, sizeof(acc));
    if (chunks > 0) simd.column_sum(DType::f32, part.data() + c0, in.k, chunks, cols, acc);
    simd.store(out.dtype, acc, cols, out.as<char>() + c0 * bytes(out.dtype));
  });
}

void round_band(const Kernels& simd, const float* band, int64_t ld, int64_t cols, char* to) {
  for (int64_t r = 0; r < 16; ++r, band += ld, to += ld * bytes(DType::bf16)) simd.store(DType::bf16, band, cols, to);
}

}  // namespace diptych::cpu
