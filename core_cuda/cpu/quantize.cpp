// quantize: any row of the format table, either or both copies (NUMERICS 2-4).
//
// The tensor is cut into tiles that hold whole blocks of every copy and stay in cache between the pass that takes each
// block's amax and the pass that writes its payload: memory is read once.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "cpu/blocks.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "cpu/reduce.h"
#include "cpu/run.h"
#include "cpu/scratch.h"

namespace diptych::cpu {
namespace {

constexpr int64_t kTileElements = 1 << 14;

struct Plan {
  const Kernels& simd;
  const FormatRow& format;
  ScaleParams scale;
  float tensor_scale = 1;  // per-tensor formats: known before any tile runs
  DType dtype{};
  const char* x = nullptr;
  int64_t m = 0, k = 0;
  int64_t tile_rows = 1, tile_cols = 1;
  bool any_transposed = false;

  const void* at(int64_t r, int64_t c) const { return x + (r * k + c) * bytes(dtype); }
};

struct Tile {
  int64_t r0, c0, rows, cols;
};

// Scales of the row of blocks that starts at row r, stored, and spread to one multiplier per column of the tile.
void block_scales(const Plan& p, const BlockedCopy& copy, const Tile& t, int64_t r, int64_t rows, float* multiplier) {
  const int64_t blocks = ceil_div(t.cols, copy.cols);
  const int64_t room = ceil_div(t.cols, 64) * 64;
  float* amax = scratch(Slot::scales).get<float>(4 * room);
  float *by = amax + room, *inv = by + room;
  uint8_t* code = reinterpret_cast<uint8_t*>(inv + room);
  if (rows > 1) {
    p.simd.column_amax(p.dtype, p.at(r, t.c0), p.k, rows, t.cols, amax);
    if (copy.cols > 1) p.simd.segment_amax(DType::f32, amax, t.cols, copy.cols, amax);
  } else {
    p.simd.segment_amax(p.dtype, p.at(r, t.c0), t.cols, copy.cols, amax);
  }
  p.simd.scales(p.scale, amax, blocks, by, inv, code);

  const int64_t first = (r / copy.rows) * copy.step_i + (t.c0 / copy.cols) * copy.step_j;
  if (p.format.scale == DType::f32) {
    float* out = static_cast<float*>(copy.scale_inv) + first;
    for (int64_t j = 0; j < blocks; ++j) out[j * copy.step_j] = inv[j];
  } else {
    uint8_t* out = static_cast<uint8_t*>(copy.scale_inv) + first;
    for (int64_t j = 0; j < blocks; ++j) out[j * copy.step_j] = code[j];
  }
  spread(by, 0, t.cols, copy.cols, multiplier);
}

// Payload of the tile in the tensor's orientation; scales on the way.
void encode_tile(const Plan& p, const BlockedCopy& copy, const Tile& t, uint8_t* out, int64_t ld) {
  if (p.format.per_tensor()) {
    for (int64_t r = 0; r < t.rows; ++r)
      p.simd.encode(p.format.element, p.dtype, p.at(t.r0 + r, t.c0), &p.tensor_scale, true, t.cols, out + r * ld);
    return;
  }
  float* multiplier = scratch(Slot::tile).get<float>(t.cols);
  for (int64_t r = 0; r < t.rows; r += copy.rows) {
    const int64_t rows = std::min(copy.rows, t.rows - r);
    block_scales(p, copy, t, t.r0 + r, rows, multiplier);
    for (int64_t i = r; i < r + rows; ++i)
      p.simd.encode(p.format.element, p.dtype, p.at(t.r0 + i, t.c0), multiplier, false, t.cols, out + i * ld);
  }
}

// The scales of a copy whose blocks cover the same elements as those of a copy that is already written.
void copy_scales(const Plan& p, const BlockedCopy& from, const BlockedCopy& to, const Tile& t) {
  if (p.format.per_tensor()) return;
  const int64_t size = bytes(p.format.scale);
  for (int64_t i = t.r0 / from.rows; i < ceil_div(t.r0 + t.rows, from.rows); ++i)
    for (int64_t j = t.c0 / from.cols; j < ceil_div(t.c0 + t.cols, from.cols); ++j)
      std::memcpy(static_cast<char*>(to.scale_inv) + (i * to.step_i + j * to.step_j) * size,
                  static_cast<const char*>(from.scale_inv) + (i * from.step_i + j * from.step_j) * size, size);
}

void quantize_tile(const Plan& p, const BlockedCopy* rowwise, const BlockedCopy* columnwise, const Tile& t) {
  const uint8_t* payload = nullptr;
  int64_t ld = 0;
  if (rowwise) {
    uint8_t* out = rowwise->data + t.r0 * p.k + t.c0;
    encode_tile(p, *rowwise, t, out, p.k);
    payload = out;
    ld = p.k;
  }
  if (!columnwise) return;
  const bool same_blocks = rowwise && rowwise->rows == columnwise->rows && rowwise->cols == columnwise->cols;
  if (same_blocks) copy_scales(p, *rowwise, *columnwise, t);
  if (!columnwise->transposed) {
    uint8_t* out = columnwise->data + t.r0 * p.k + t.c0;
    if (same_blocks) {
      for (int64_t r = 0; r < t.rows; ++r) std::memcpy(out + r * p.k, payload + r * ld, t.cols);
    } else {
      encode_tile(p, *columnwise, t, out, p.k);
    }
    return;
  }
  if (!same_blocks) {
    ld = ceil_div(t.cols, 64) * 64;
    uint8_t* staged = scratch(Slot::bytes).get<uint8_t>(t.rows * ld);
    encode_tile(p, *columnwise, t, staged, ld);
    payload = staged;
  }
  p.simd.transpose(payload, ld, t.rows, t.cols, columnwise->data + t.c0 * p.m + t.r0, p.m);
}

// Tiles hold whole blocks of every copy (or reach the tensor's edge) and are wide along memory.
void choose_tile(Plan& p, const BlockedCopy* rowwise, const BlockedCopy* columnwise) {
  int64_t rows = 1, cols = 1;
  for (const BlockedCopy* c : {rowwise, columnwise}) {
    if (!c || p.format.per_tensor()) continue;
    rows = std::min(std::lcm(rows, c->rows), std::max<int64_t>(p.m, 1));
    cols = std::min(std::lcm(cols, c->cols), std::max<int64_t>(p.k, 1));
  }
  const auto grow = [](int64_t unit, int64_t wanted, int64_t limit) {
    return std::max(unit, std::min(ceil_div(limit, unit), wanted / unit) * unit);
  };
  if (p.any_transposed) rows = grow(rows, 128, p.m);
  p.tile_cols = grow(cols, kTileElements / std::min(rows, kTileElements), p.k);
  p.tile_rows = grow(rows, kTileElements / std::min(p.tile_cols, kTileElements), p.m);
}

Status run(const QuantizeArgs& args) {
  const FormatRow& f = row(args.spec.format);
  if ((f.element != DType::e4m3 && f.element != DType::e5m2) ||
      f.scale != (f.rule == ScaleRule::divide ? DType::f32 : DType::e8m0))
    return Status(Code::unsupported, std::string("quantize: the CPU kernels write float8_e4m3fn and float8_e5m2 with "
                                                 "float32 (divide) or float8_e8m0fnu (e8m0_ceil) scales, not ") +
                                         f.name + " (" + name(f.element) + ", " + name(f.scale) + ")");
  Plan p{kernels(), f, {f.rule, row(f.element).max, args.spec.eps, args.spec.pow2, 0}};
  p.scale.value_for_inf = f.per_tensor() ? row(DType::f32).max : row(args.x.dtype).max;
  p.dtype = args.x.dtype;
  p.x = args.x.as<const char>();
  p.m = args.x.rows();
  p.k = args.x.cols();

  BlockedCopy copies[2] = {};
  const BlockedCopy *rowwise = nullptr, *columnwise = nullptr;
  if (args.rowwise.given()) rowwise = &(copies[0] = blocked_copy(f, args.rowwise, p.m, p.k));
  if (args.columnwise.given()) columnwise = &(copies[1] = blocked_copy(f, args.columnwise, p.m, p.k));
  p.any_transposed = columnwise && columnwise->transposed;

  if (f.per_tensor()) {
    if (!args.amax_ready) *args.amax.as<float>() = amax_of(args.x);
    float inv;
    uint8_t code;
    p.simd.scales(p.scale, args.amax.as<float>(), 1, &p.tensor_scale, &inv, &code);
    for (const BlockedCopy* c : {rowwise, columnwise}) {
      if (!c) continue;
      if (f.scale == DType::f32) *static_cast<float*>(c->scale_inv) = inv;
      if (f.scale == DType::e8m0) *static_cast<uint8_t*>(c->scale_inv) = code;
    }
    if (!p.any_transposed) {  // rows mean nothing: one long one has no ragged ends
      p.k *= p.m;
      p.m = 1;
    }
  }
  if (p.m == 0 || p.k == 0) return Status();

  choose_tile(p, rowwise, columnwise);
  const int64_t across = ceil_div(p.k, p.tile_cols), tiles = ceil_div(p.m, p.tile_rows) * across;
  for_tasks(tiles, p.m * p.k >= kThreadedElements, [&](int64_t i) {
    if (f.per_tensor()) i = tiles - 1 - i;  // backwards: what the amax pass read last is still in cache
    const int64_t r0 = i / across * p.tile_rows, c0 = i % across * p.tile_cols;
    quantize_tile(p, rowwise, columnwise,
                  {r0, c0, std::min(p.tile_rows, p.m - r0), std::min(p.tile_cols, p.k - c0)});
  });
  for (Slot slot : {Slot::tile, Slot::bytes, Slot::scales}) scratch(slot).trim(1 << 20);
  return Status();
}

}  // namespace

Status quantize(const QuantizeArgs& args, const Execution&) {
  return guarded("quantize", [&] { return run(args); });
}

}  // namespace diptych::cpu
