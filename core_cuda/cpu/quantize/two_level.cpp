// quantize for two-level formats: 4-bit elements, an E4M3 scale for 16 of them, an amax for the tensor (NUMERICS 5).
//
// A rowwise copy alone is encoded as one long row. Otherwise tiles are encoded in bands of 16 rows, which hold whole
// blocks of either copy and whole Hadamard transforms; the columnwise payload of a tile is collected in cache until its
// rows are long enough to be written.
#include <algorithm>
#include <cstring>
#include <string>

#include "cpu/base/run.h"
#include "cpu/base/scratch.h"
#include "cpu/isa/isa.h"
#include "cpu/kernels.h"
#include "cpu/quantize/amax.h"

namespace diptych::cpu {
namespace {

constexpr int64_t kBlock = 16;
constexpr int64_t kTile = 256;              // rows and columns of a tile
constexpr int64_t kNearElements = 1 << 12;  // they stay in the first-level cache

Level level_of(float amax) {
  constexpr float kMax = row(DType::f32).max;
  const float ratio = row(DType::e4m3).max * row(DType::e2m1).max / amax;
  const float s = ratio < kMax ? ratio : kMax;  // a NaN amax saturates
  const float scale = amax == 0.0f || s == 0.0f ? 1.0f : s;
  return {scale * (1.0f / row(DType::e2m1).max), 1.0f / scale};
}

// The arguments of one copy.
struct Copy {
  const QuantizedView* q = nullptr;  // null: not wanted
  const float* amax = nullptr;
  Draws draws{};       // of the copy's first block
  int64_t stride = 0;  // blocks of a row of the whole tensor's copy, by which random bytes are counted
};

struct Plan {
  const Kernels& simd;
  const Input& in;
  int64_t m, k;
  bool square, row_amax, rht, signs, stochastic;
  Copy rowwise, columnwise;
};

// Peaks, multipliers and codes of up to n blocks, in one thread's memory.
struct Blocks {
  explicit Blocks(int64_t n) : peaks(scratch(Slot::scales).get<float>(3 * n)), multiplier(peaks + n) {
    code = reinterpret_cast<uint8_t*>(multiplier + n);
  }
  float* peaks;
  float* multiplier;
  uint8_t* code;
};

// Returns the draws from block `block` of row r of a copy on.
Draws draws_at(const Copy& c, int64_t r, int64_t block, int64_t step) {
  Draws d = c.draws;
  d.first += r * c.stride + block;
  d.step = step;
  return d;
}

// Returns the copy of in [m, k] with its draws. `rng`: of a whole tensor, or of a part of one.
Copy copy_of(const QuantizedView& q, const TensorView& amax, const TensorView& rng, const Input& in) {
  Copy c{&q, amax.as<const float>(), {}, (q.columnwise ? in.m : in.k) / kBlock};
  if (!rng.given()) return c;
  const uint32_t* words = rng.as<const uint32_t>();
  c.draws = {{words[0], words[1]}, (words[2] | uint64_t{words[3]} << 32) + q.columnwise, 0, 1};
  if (rng.numel() == 4) return c;
  const uint32_t outer = words[q.columnwise ? 5 : 4], inner = words[q.columnwise ? 4 : 5];
  c.stride = words[q.columnwise ? 6 : 7] / kBlock;
  c.draws.first = uint64_t{outer} * c.stride + inner / kBlock;
  return c;
}

// Encodes n elements of the rowwise copy from element c0 of row r on, where rows have k elements.
void encode_run(const Plan& p, const Level& level, int64_t k, int64_t r, int64_t c0, int64_t n) {
  const Copy& c = p.rowwise;
  const TensorView& from_x = p.in.x;
  const int64_t at = r * k + c0;
  const char* x = from_x.as<const char>() + at * bytes(from_x.dtype);
  for (int64_t i = 0; i < n; i += kNearElements, x += kNearElements * bytes(from_x.dtype)) {
    const int64_t part = std::min(kNearElements, n - i), block = (at + i) / kBlock;
    const Blocks b(kNearElements / kBlock);
    p.simd.row_peaks(from_x.dtype, x, part, b.peaks);
    p.simd.two_level_scales(level, b.peaks, part / kBlock, b.multiplier, c.q->scale_inv.as<uint8_t>() + block);
    const Draws draws = draws_at(c, r, (c0 + i) / kBlock, 1);
    p.simd.encode_rows(from_x.dtype, x, b.multiplier, part, p.stochastic ? &draws : nullptr,
                       c.q->data.as<uint8_t>() + (at + i) / 2);
  }
}

void quantize_rows(const Plan& p) {
  // With one amax for the whole tensor rows do not matter, and one long row has no short ends. Random bytes of a part
  // with fewer columns have gaps between rows.
  const bool by_row = p.row_amax || p.rowwise.stride != p.k / kBlock;
  const int64_t m = by_row ? p.m : 1, k = by_row ? p.k : p.m * p.k;
  const int64_t tile_cols = std::min(k, kThreadedElements),
                tile_rows = std::max<int64_t>(1, kThreadedElements / tile_cols);
  const int64_t across = ceil_div(k, tile_cols), tiles = across * ceil_div(m, tile_rows);
  for_tasks(tiles, m * k >= kThreadedElements, [&](int64_t i) {
    i = tiles - 1 - i;  // backwards: what the amax pass read last is still in cache
    const int64_t r0 = i / across * tile_rows, c0 = i % across * tile_cols;
    for (int64_t r = r0; r < std::min(m, r0 + tile_rows); ++r)
      encode_run(p, level_of(p.rowwise.amax[p.row_amax ? r : 0]), k, r, c0, std::min(tile_cols, k - c0));
  });
}

// Rows of a tile in cache: 16, or fewer if only the rowwise copy is wanted.
struct Band {
  DType dtype;
  const char* x;
  int64_t ld, r0, rows, c0, cols;
};

void encode_band_rows(const Plan& p, const Band& band) {
  const Copy& c = p.rowwise;
  const int64_t blocks = band.cols / kBlock;
  const Blocks b(band.cols);
  uint8_t* scale = c.q->scale_inv.as<uint8_t>() + (band.r0 * p.k + band.c0) / kBlock;
  if (p.square) {
    p.simd.column_peaks(band.dtype, band.x, band.ld, band.cols, b.peaks);
    p.simd.row_peaks(DType::f32, b.peaks, band.cols, b.multiplier);
    std::copy_n(b.multiplier, blocks, b.peaks);
    p.simd.two_level_scales(level_of(*c.amax), b.peaks, blocks, b.multiplier, b.code);
  }
  for (int64_t r = 0; r < band.rows; ++r, scale += p.k / kBlock) {
    const char* x = band.x + r * band.ld * bytes(band.dtype);
    const int64_t at = (band.r0 + r) * p.k + band.c0;
    if (p.square) {
      std::copy_n(b.code, blocks, scale);
    } else {
      p.simd.row_peaks(band.dtype, x, band.cols, b.peaks);
      p.simd.two_level_scales(level_of(c.amax[p.row_amax ? band.r0 + r : 0]), b.peaks, blocks, b.multiplier, scale);
    }
    const Draws draws = draws_at(c, band.r0 + r, band.c0 / kBlock, 1);
    p.simd.encode_rows(band.dtype, x, b.multiplier, band.cols, p.stochastic ? &draws : nullptr,
                       c.q->data.as<uint8_t>() + at / 2);
  }
}

// Column j's payload goes to payload[j * ld], its scale to scale[j * ld].
void encode_band_columns(const Plan& p, const Band& band, uint64_t* payload, uint8_t* scale, int64_t ld) {
  const Copy& c = p.columnwise;
  const Level level = level_of(*c.amax);
  const Blocks b(band.cols);
  p.simd.column_peaks(band.dtype, band.x, band.ld, band.cols, b.peaks);
  if (p.square) {
    p.simd.row_peaks(DType::f32, b.peaks, band.cols, b.multiplier);
    for (int64_t j = band.cols - 1; j >= 0; --j) b.peaks[j] = b.multiplier[j / kBlock];
  }
  p.simd.two_level_scales(level, b.peaks, band.cols, b.multiplier, b.code);
  for (int64_t j = 0; j < band.cols; ++j) scale[j * ld] = b.code[j];
  const Draws draws = draws_at(c, band.c0, band.r0 / kBlock, c.stride);
  p.simd.encode_columns(band.dtype, band.x, band.ld, band.cols, b.multiplier, p.stochastic ? &draws : nullptr, payload,
                        ld);
}

// Writes rows of the columnwise copy from the payload and scales that were collected.
void write_columns(const Plan& p, int64_t r0, int64_t bands, int64_t c0, int64_t cols, const uint64_t* payload,
                   const uint8_t* scale, int64_t ld) {
  constexpr int64_t kAhead = 32;
  uint8_t* data = p.columnwise.q->data.as<uint8_t>() + (c0 * p.m + r0) / 2;
  uint8_t* scales = p.columnwise.q->scale_inv.as<uint8_t>() + (c0 * p.m + r0) / kBlock;
  for (int64_t j = 0; j < cols; ++j, data += p.m / 2, scales += p.m / kBlock) {
    for (int64_t b = 0; b < bands * 8; b += 64) __builtin_prefetch(data + kAhead * p.m / 2 + b, 1, 2);
    std::memcpy(data, payload + j * ld, bands * sizeof(uint64_t));
    std::memcpy(scales, scale + j * ld, bands);
  }
}

void quantize_tile(const Plan& p, int64_t r0, int64_t rows, int64_t c0, int64_t cols) {
  constexpr int64_t kBands = kTile / kBlock, kLd = kTile + 16;  // odd in cache lines, so that columns use every set
  char* staged = scratch(Slot::tile).get<char>(kBlock * kLd * 3 * sizeof(float));
  float* rotated = reinterpret_cast<float*>(staged + kBlock * kLd * sizeof(float));
  char* rounded = staged + kBlock * kLd * 2 * sizeof(float);
  uint64_t* payload = scratch(Slot::bytes).get<uint64_t>(kTile * kBands + kTile * kBands / 8);
  uint8_t* scale = reinterpret_cast<uint8_t*>(payload + kTile * kBands);
  for (int64_t r = 0; r < rows; r += kBlock) {
    const Band band{p.in.dtype, staged, kLd, r0 + r, std::min(kBlock, rows - r), c0, cols};
    p.in.stage(band.r0, band.rows, c0, cols, staged, kLd);
    if (p.columnwise.q) {
      Band turned = band;
      if (p.rht) {
        const bool wide = p.in.dtype == DType::f32;
        if (wide) round_band(p.simd, reinterpret_cast<const float*>(staged), kLd, cols, rounded);
        p.simd.rotate(wide ? rounded : staged, kLd, cols, p.signs, rotated, kLd);
        turned.dtype = DType::f32;
        turned.x = reinterpret_cast<const char*>(rotated);
      }
      encode_band_columns(p, turned, payload + r / kBlock, scale + r / kBlock, kBands);
    }
    if (p.rowwise.q) encode_band_rows(p, band);
  }
  if (p.columnwise.q) write_columns(p, r0, rows / kBlock, c0, cols, payload, scale, kBands);
}

Status run(const QuantizeArgs& args) {
  const FormatRow& f = row(args.spec.format);
  if (f.element != DType::e2m1 || f.scale != DType::e4m3 || f.block_rows != 1 || f.block_cols != kBlock ||
      f.columnwise != ColumnwiseLayout::transposed)
    return Status(Code::unsupported,
                  std::string("quantize: the CPU kernel for two-level scales writes float4_e2m1fn in blocks of 1x16 "
                              "with float8_e4m3fn scales and a transposed columnwise copy, not ") +
                      f.name);
  const QuantSpec& spec = args.spec;
  const Input in(args.x, args.source);
  if (args.column_sum.given()) column_sums(in, args.column_sum);
  Plan p{kernels(),
         in,
         in.m,
         in.k,
         spec.has(kSquare),
         spec.has(kRowAmax),
         spec.has(kRht),
         spec.has(kRhtSigns),
         spec.has(kStochastic),
         {},
         {}};
  if (args.rowwise.given()) p.rowwise = copy_of(args.rowwise, args.amax, args.rng, in);
  if (args.columnwise.given()) p.columnwise = copy_of(args.columnwise, args.columnwise_amax, args.rng, in);
  if (args.amax_mode == AmaxMode::compute)
    amaxes_of(in, spec.flags, args.amax.as<float>(), args.columnwise_amax.as<float>());
  if (p.m == 0 || p.k == 0) return Status();
  if (!p.columnwise.q && !p.square && !in.staged) {
    quantize_rows(p);
    return Status();
  }

  // Tiles run down the columns, so that the columnwise copy's rows are written in whole cache lines.
  const int64_t down = ceil_div(p.m, kTile), tiles = down * ceil_div(p.k, kTile);
  const int64_t run = std::clamp<int64_t>(tiles / 32, 1, 8);  // tiles of a task
  for_tasks(ceil_div(tiles, run), p.m * p.k >= kThreadedElements, [&](int64_t task) {
    for (int64_t i = task * run; i < std::min(tiles, (task + 1) * run); ++i) {
      const int64_t r0 = i % down * kTile, c0 = i / down * kTile;
      quantize_tile(p, r0, std::min(kTile, p.m - r0), c0, std::min(kTile, p.k - c0));
    }
  });
  return Status();
}

}  // namespace

Status quantize_two_level(const QuantizeArgs& args, const Execution&) {
  return guarded("quantize", [&] { return run(args); });
}

}  // namespace diptych::cpu
