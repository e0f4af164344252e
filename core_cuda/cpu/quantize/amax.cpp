// Amaxes of a tensor, of its rows and of the Hadamard-rotated tensor.
#include "cpu/quantize/amax.h"

#include <algorithm>
#include <vector>

#include "cpu/base/run.h"
#include "cpu/base/scratch.h"
#include "cpu/isa/isa.h"
#include "diptych/quantize.h"

namespace diptych::cpu {

namespace {

float amax_of(const TensorView& x) {
  const Kernels& simd = kernels();
  const int64_t n = x.numel();
  const char* data = x.as<const char>();
  if (n < kThreadedElements) return simd.amax(x.dtype, data, n);
  constexpr int64_t kChunk = 1 << 16;
  std::vector<float> part(ceil_div(n, kChunk));
  parallel_for(static_cast<int64_t>(part.size()), [&](int64_t i) {
    part[i] = simd.amax(x.dtype, data + i * kChunk * bytes(x.dtype), std::min(kChunk, n - i * kChunk));
  });
  return *std::max_element(part.begin(), part.end());
}

// Returns the amax of the rows that are used. Each row is read once, however often it is used.
float amax_of_rows(const TensorView& x, const std::vector<char>& used) {
  const Kernels& simd = kernels();
  const int64_t rows = x.rows(), k = x.cols(), step = std::max<int64_t>(1, kThreadedElements / std::max<int64_t>(1, k));
  std::vector<float> part(ceil_div(rows, step));
  for_tasks(static_cast<int64_t>(part.size()), x.numel() >= kThreadedElements, [&](int64_t i) {
    for (int64_t r = i * step, end = std::min(rows, r + step); r < end; ++r)
      if (used[r]) part[i] = std::max(part[i], simd.amax(x.dtype, x.as<const char>() + r * k * bytes(x.dtype), k));
  });
  return part.empty() ? 0.0f : *std::max_element(part.begin(), part.end());
}

// Amax of 16 rows after the Hadamard transform, a few columns at a time
float rotated_amax(const Kernels& simd, const char* x, int64_t ld, int64_t cols, bool signs) {
  constexpr int64_t kStrip = 256;
  alignas(64) float rotated[16 * kStrip];
  float amax = 0;
  for (int64_t c = 0; c < cols; c += kStrip) {
    const int64_t width = std::min(kStrip, cols - c);
    simd.rotate(x + c * bytes(DType::bf16), ld, width, signs, rotated, width);
    amax = std::max(amax, simd.amax(DType::f32, rotated, 16 * width));
  }
  return amax;
}

// One pass over bands of whole transforms, for both results.
void banded_amaxes(const Input& in, int32_t flags, float* out, float* columnwise_out) {
  const Kernels& simd = kernels();
  const int64_t m = in.m, k = in.k, size = bytes(in.dtype);
  const bool rotate = columnwise_out && (flags & kRht);
  const int64_t tile_cols = std::clamp<int64_t>(k, 1, 4096), across = std::max<int64_t>(1, ceil_div(k, tile_cols));
  const int64_t tile_rows = 16 * std::max<int64_t>(1, kThreadedElements / 16 / tile_cols),
                down = ceil_div(m, tile_rows);
  std::vector<float> of_rows(m * across), of_tiles(down * across);
  for_tasks(down * across, m * k >= kThreadedElements, [&](int64_t i) {
    const int64_t c0 = i % across * tile_cols, cols = std::min(tile_cols, k - c0);
    const int64_t r0 = i / across * tile_rows, end = std::min(m, r0 + tile_rows);
    for (int64_t band = r0; band < end; band += 16) {
      const int64_t rows = std::min<int64_t>(16, end - band);
      const char* first = in.staged ? nullptr : in.x.as<const char>() + (band * k + c0) * size;
      int64_t ld = k;
      if (in.staged) {
        char* staged = scratch(Slot::tile).get<char>(2 * 16 * tile_cols * size);
        in.stage(band, rows, c0, cols, staged, tile_cols);
        first = staged;
        ld = tile_cols;
      }
      for (int64_t r = 0; r < rows; ++r)
        of_rows[(band + r) * across + i % across] = simd.amax(in.dtype, first + r * ld * size, cols);
      if (!rotate) continue;
      if (in.dtype == DType::f32) {
        char* rounded = const_cast<char*>(first) + 16 * tile_cols * size;
        round_band(simd, reinterpret_cast<const float*>(first), ld, cols, rounded);
        first = rounded;
      }
      of_tiles[i] = std::max(of_tiles[i], rotated_amax(simd, first, ld, cols, flags & kRhtSigns));
    }
  });
  const auto largest = [](const float* v, int64_t n) { return n ? *std::max_element(v, v + n) : 0.0f; };
  const float whole = largest(of_rows.data(), m * across);
  if (out && (flags & kRowAmax)) {
    for (int64_t r = 0; r < m; ++r) out[r] = largest(&of_rows[r * across], across);
  } else if (out) {
    *out = whole;
  }
  if (columnwise_out) *columnwise_out = rotate ? largest(of_tiles.data(), down * across) : whole;
}

}  // namespace

void amaxes_of(const Input& in, int32_t flags, float* out, float* columnwise_out) {
  if (in.m == 0 || in.k == 0) {  // the other extent may be huge
    if (out) std::fill_n(out, flags & kRowAmax ? in.m : 1, 0.0f);
    if (columnwise_out) *columnwise_out = 0.0f;
    return;
  }
  const std::vector<char> used = in.used();
  if ((in.staged && used.empty()) || (flags & (kRowAmax | kRht))) return banded_amaxes(in, flags, out, columnwise_out);
  const float amax = used.empty() ? amax_of(in.x) : amax_of_rows(in.x, used);
  if (out) *out = amax;
  if (columnwise_out) *columnwise_out = amax;
}

Status amax(const AmaxArgs& args, const Execution&) {
  return guarded("amax", [&] {
    amaxes_of(Input(args.x, args.source), args.flags, args.out.as<float>(), args.columnwise_out.as<float>());
    return Status();
  });
}

}  // namespace diptych::cpu
