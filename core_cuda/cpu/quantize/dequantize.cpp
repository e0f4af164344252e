// dequantize: float32(q) * scale_inv, rounded once, then one cast, in the tensor's orientation from either copy. A
// two-level scale_inv is (float32(s8) * amax) * float32(1 / 2688).
#include <algorithm>
#include <string>

#include "cpu/base/run.h"
#include "cpu/base/scratch.h"
#include "cpu/isa/isa.h"
#include "cpu/quantize/blocks.h"
#include "cpu/quantize/codec.h"
#include "diptych/quantize.h"

namespace diptych::cpu {
namespace {

Status run(const DequantizeArgs& args) {
  const FormatRow& f = row(args.q.format);
  const bool two_level = f.rule == ScaleRule::two_level, packed = f.element == DType::e2m1;
  if ((f.element != DType::e4m3 && f.element != DType::e5m2 && !packed) ||
      (f.scale != DType::f32 && f.scale != DType::e8m0 && f.scale != DType::e4m3))
    return Status(Code::unsupported,
                  std::string("dequantize: the CPU kernels read float8_e4m3fn, float8_e5m2 and float4_e2m1fn with "
                              "float32, float8_e8m0fnu or float8_e4m3fn scales, not ") +
                      f.name + " (" + name(f.element) + ", " + name(f.scale) + ")");
  const Kernels& simd = kernels();
  const TensorView& out = args.out;
  const int64_t m = out.rows(), k = out.cols();
  if (m == 0 || k == 0) return Status();
  const BlockedCopy copy = blocked_copy(f, args.q, m, k);
  const float* amax = two_level ? args.q.amax.as<const float>() : nullptr;
  const int64_t amax_step = two_level && args.q.amax.numel() != 1;  // 1: there is one amax for each row

  // Tiles start where blocks start.
  const int64_t wide = std::max<int64_t>(copy.cols, (copy.transposed ? 256 : 4096) / copy.cols * copy.cols);
  const int64_t tile_cols = std::min(k, wide);
  const int64_t tile_rows = copy.transposed ? 64 : std::max<int64_t>(1, (1 << 14) / tile_cols);
  const int64_t across = ceil_div(k, tile_cols);
  for_tasks(ceil_div(m, tile_rows) * across, m * k >= kThreadedElements, [&](int64_t t) {
    const int64_t r0 = t / across * tile_rows, c0 = t % across * tile_cols;
    const int64_t rows = std::min(tile_rows, m - r0), cols = std::min(tile_cols, k - c0);
    // The tile as it is stored: unpacked where elements share bytes, then in the tensor's orientation.
    const int64_t lines = copy.transposed ? cols : rows, width = copy.transposed ? rows : cols;
    int64_t ld = copy.transposed ? m : k;
    const int64_t at = copy.transposed ? c0 * m + r0 : r0 * k + c0;
    const uint8_t* q = copy.data + at;
    uint8_t* staged = scratch(Slot::bytes).get<uint8_t>(2 * tile_rows * tile_cols);
    if (packed) {
      for (int64_t i = 0; i < lines; ++i) simd.unpack(copy.data + (at + i * ld) / 2, width, staged + i * width);
      q = staged;
      ld = width;
      staged += tile_rows * tile_cols;
    }
    if (copy.transposed) {
      simd.transpose(q, ld, cols, rows, staged, tile_cols);
      q = staged;
      ld = tile_cols;
    }

    float* by = scratch(Slot::scales).get<float>(ceil_div(tile_cols, copy.cols));
    int64_t have = -1;  // the row of blocks whose scales are in `by`
    for (int64_t r = 0; r < rows; ++r, q += ld) {
      if (const int64_t i = (r0 + r) / copy.rows; i != have) {
        have = i;
        const int64_t first = i * copy.step_i + c0 / copy.cols * copy.step_j;
        for (int64_t j = 0; j < ceil_div(cols, copy.cols); ++j) {
          by[j] = block_scale(f.scale, copy.scale_inv, first + j * copy.step_j);
          if (two_level) by[j] = by[j] * amax[(r0 + r) * amax_step] * kAmaxUnit[1];
        }
      }
      simd.decode(packed ? DType::e4m3 : f.element, q, by, copy.cols, cols, out.dtype,
                  out.as<char>() + ((r0 + r) * k + c0) * bytes(out.dtype));
    }
  });
  return Status();
}

}  // namespace

Status dequantize(const DequantizeArgs& args, const Execution&) {
  return guarded("dequantize", [&] { return run(args); });
}

}  // namespace diptych::cpu
