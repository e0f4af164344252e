// quantize for all formats but two-level ones, either or both copies (NUMERICS 2-4).
//
// The tensor is divided into tiles that hold whole blocks of every copy. A tile stays in cache between the pass that
// computes each block's amax and the pass that writes its payload, so that memory is read once.
#include "diptych/quantize.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <numeric>
#include <string>
#include <vector>

#include "cpu/base/run.h"
#include "cpu/base/scratch.h"
#include "cpu/isa/isa.h"
#include "cpu/quantize/amax.h"
#include "cpu/quantize/blocks.h"
#include "cpu/quantize/from_rows.h"

namespace diptych::cpu {
namespace {

constexpr int64_t kTileElements = 1 << 17;  // a tile stays in the second-level cache
constexpr int64_t kNearElements = 1 << 12;  // they stay in the first-level cache

// A copy whose scales may be stored in several places each: the scale of a square block repeats along one axis.
struct Copy : BlockedCopy {
  int64_t repeat_i = 1, repeat_j = 1;  // block (i, j) has its first scale at (i * repeat_i, j * repeat_j)

  int64_t scale_at(int64_t i, int64_t j) const { return i * repeat_i * step_i + j * repeat_j * step_j; }
};

struct Plan {
  const Kernels& simd;
  const FormatRow& format;
  ScaleParams scale;
  float tensor_scale = 1;  // per-tensor formats: known before any tile runs
  bool bounded = true;     // no product of a finite element with its scale overflows
  const Input& in;
  int64_t m = in.m, k = in.k;
  int64_t tile_rows = 1, tile_cols = 1;
  bool any_transposed = false;
  bool staged = false;
  bool from_rows = false;
};

struct Tile {
  int64_t r0, c0, rows, cols;
  const char* x;  // the tile's first element, in the tensor or in a staged copy
  int64_t ld;
  float* amax;  // raised to the tile's amax; null: not wanted
};

// Stores the scale of block (i, j) in all of its places.
template <class T>
void put_scale(const Plan& p, const Copy& c, int64_t i, int64_t j, T value) {
  const int64_t down = c.repeat_i > 1 ? std::min(c.repeat_i, p.m - i * c.rows) : 1;
  const int64_t across = c.repeat_j > 1 ? std::min(c.repeat_j, p.k - j * c.cols) : 1;
  T* out = static_cast<T*>(c.scale_inv) + c.scale_at(i, j);
  for (int64_t a = 0; a < down; ++a)
    for (int64_t b = 0; b < across; ++b) out[a * c.step_i + b * c.step_j] = value;
}

// Stores the scales of rows of blocks from block (i, j) on.
template <class T>
void put_scales(const Plan& p, const Copy& c, int64_t i, int64_t j, int64_t blocks, const T* values, int64_t total) {
  const bool spread = c.repeat_i * c.repeat_j > 1;
  for (const T* end = values + total; values < end; values += blocks, ++i) {
    T* out = static_cast<T*>(c.scale_inv) + c.scale_at(i, j);
    for (int64_t b = 0; b < blocks && !spread; ++b) out[b * c.step_j] = values[b];
    for (int64_t b = 0; b < blocks && spread; ++b) put_scale(p, c, i, j + b, values[b]);
  }
}

// Computes and stores the scales of `count` rows of blocks from row r of the tile on; returns one multiplier per block.
const float* block_scales(const Plan& p, const Copy& copy, const Tile& t, int64_t r, int64_t count) {
  const int64_t blocks = ceil_div(t.cols, copy.cols), total = count * blocks;
  const int64_t room = ceil_div(std::max(total, t.cols), 16) * 16;
  float* amax = scratch(Slot::scales).get<float>(4 * room);
  float *by = amax + room, *inv = by + room;
  uint8_t* code = reinterpret_cast<uint8_t*>(inv + room);
  const char* x = t.x + r * t.ld * bytes(p.in.dtype);
  if (copy.rows > 1) {
    p.simd.column_amax(p.in.dtype, x, t.ld, std::min(copy.rows, t.rows - r), t.cols, amax);
    if (copy.cols > 1) p.simd.segment_amax(DType::f32, amax, t.cols, copy.cols, amax);
  } else {
    for (int64_t i = 0; i < count; ++i, x += t.ld * bytes(p.in.dtype))
      p.simd.segment_amax(p.in.dtype, x, t.cols, copy.cols, amax + i * blocks);
  }
  p.simd.scales(p.scale, amax, total, by, inv, code);

  const int64_t i = (t.r0 + r) / copy.rows, j = t.c0 / copy.cols;
  if (p.format.scale == DType::f32) put_scales(p, copy, i, j, blocks, inv, total);
  if (p.format.scale == DType::e8m0) put_scales(p, copy, i, j, blocks, code, total);
  return by;
}

// Prefetches for writing, because short runs in rows far apart are no stream that the hardware prefetcher follows.
void prefetch_write(const uint8_t* p, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(p + b, 1, 2);
}

// Writes the payload of the tile in the tensor's orientation, and the scales.
void encode_tile(const Plan& p, const Copy& copy, const Tile& t, uint8_t* out, int64_t ld) {
  const int64_t size = bytes(p.in.dtype);
  const bool strided = ld == p.k && t.cols < p.k;
  const auto encode_row = [&](int64_t i, const float* multiplier, int64_t width) {
    if (strided) prefetch_write(out + (i + 4) * ld, t.cols);
    p.simd.encode(p.format.element, p.in.dtype, t.x + i * t.ld * size, multiplier, p.bounded, width, t.cols,
                  out + i * ld);
  };
  if (p.format.one_scale()) {
    for (int64_t i = 0; i < t.rows; ++i) {
      if (t.amax) *t.amax = std::max(*t.amax, p.simd.amax(p.in.dtype, t.x + i * t.ld * size, t.cols));
      encode_row(i, &p.tensor_scale, t.cols);
    }
  } else {
    // Rows of one-row blocks are taken a few at a time, as many as stay in the first-level cache.
    const int64_t count = copy.rows > 1 ? 1 : std::max<int64_t>(1, kNearElements / t.cols);
    const int64_t blocks = ceil_div(t.cols, copy.cols);
    for (int64_t r = 0; r < t.rows; r += count * copy.rows) {
      const int64_t end = std::min(t.rows, r + count * copy.rows);
      const float* multiplier = block_scales(p, copy, t, r, ceil_div(end - r, copy.rows));
      for (int64_t i = r; i < end; ++i) encode_row(i, multiplier + (i - r) / copy.rows * blocks, copy.cols);
    }
  }
}

// Copies the tile's scales from a copy that is already written to one whose blocks cover the same elements.
void copy_scales(const Plan& p, const Copy& from, const Copy& to, const Tile& t) {
  if (p.format.one_scale()) return;
  for (int64_t i = t.r0 / from.rows; i < ceil_div(t.r0 + t.rows, from.rows); ++i)
    for (int64_t j = t.c0 / from.cols; j < ceil_div(t.c0 + t.cols, from.cols); ++j) {
      const int64_t at = from.scale_at(i, j);
      if (p.format.scale == DType::f32) put_scale(p, to, i, j, static_cast<const float*>(from.scale_inv)[at]);
      if (p.format.scale == DType::e8m0) put_scale(p, to, i, j, static_cast<const uint8_t*>(from.scale_inv)[at]);
    }
}

// Returns the row pitch of a staged tile in bytes: an odd number of cache lines, so that columns use every cache set.
int64_t padded(int64_t bytes) { return (ceil_div(bytes, 64) | 1) * 64; }

// Copies the tile's input to scratch, because the gaps between its rows can map a whole tile to a few cache sets.
void stage_input(const Plan& p, Tile& t) {
  const int64_t size = bytes(p.in.dtype), ld = padded(t.cols * size) / size;
  char* to = scratch(Slot::tile).get<char>(t.rows * ld * size);
  if (p.in.staged) {
    p.in.stage(t.r0, t.rows, t.c0, t.cols, to, ld);
  } else {
    p.simd.gather(t.x, t.ld * size, t.rows, t.cols * size, to, ld * size);
  }
  t.x = to;
  t.ld = ld;
}

// Quantizes the rows of a tile, stores them where they are wanted, and makes the columnwise copy's blocks of them.
void quantize_rows_and_shift(const Plan& p, const Copy* rowwise, const Copy& columnwise, const Tile& t) {
  const int64_t width = columnwise.cols, blocks = ceil_div(t.cols, width), ld = padded(t.cols);
  uint8_t* here = scratch(Slot::bytes).get<uint8_t>(t.rows * ld);
  float* inv = scratch(Slot::row_scales).get<float>(t.rows * blocks);
  Copy rows{BlockedCopy{1, width, false, blocks, 1, here, inv}};
  Tile local = t;
  local.r0 = local.c0 = 0;
  encode_tile(p, rows, local, here, ld);
  if (rowwise) {
    put_scales(p, *rowwise, t.r0, t.c0 / width, blocks, inv, t.rows * blocks);
    for (int64_t r = 0; r < t.rows; ++r) std::memcpy(rowwise->data + (t.r0 + r) * p.k + t.c0, here + r * ld, t.cols);
  }
  for (int64_t r = 0; r < t.rows; r += columnwise.rows)
    for (int64_t b = 0; b < blocks; ++b) {
      const float top =
          join_rows(p.simd, p.format.element, here + r * ld + b * width, ld, std::min(columnwise.rows, t.rows - r),
                    std::min(width, t.cols - b * width), inv + r * blocks + b, blocks);
      put_scale(p, columnwise, (t.r0 + r) / columnwise.rows, t.c0 / width + b, top);
    }
  p.simd.transpose(here, ld, t.rows, t.cols, columnwise.data + t.c0 * p.m + t.r0, p.m);
}

void quantize_tile(const Plan& p, const Copy* rowwise, const Copy* columnwise, Tile t) {
  if (p.staged) stage_input(p, t);
  if (p.from_rows) return quantize_rows_and_shift(p, rowwise, *columnwise, t);
  const bool same_blocks =
      rowwise && columnwise && rowwise->rows == columnwise->rows && rowwise->cols == columnwise->cols;
  uint8_t* here = nullptr;  // payload of the whole tile before it is transposed
  const int64_t ld = padded(t.cols);
  if (p.any_transposed) here = scratch(Slot::bytes).get<uint8_t>(t.rows * ld);
  const auto write = [&](const Copy& copy, const uint8_t* from, int64_t ld_from) {
    uint8_t* out = copy.data + t.r0 * p.k + t.c0;
    for (int64_t r = 0; r < t.rows; ++r) std::memcpy(out + r * p.k, from + r * ld_from, t.cols);
  };

  if (rowwise) {
    uint8_t* out = rowwise->data + t.r0 * p.k + t.c0;
    if (same_blocks && columnwise->transposed) {
      encode_tile(p, *rowwise, t, here, ld);
      write(*rowwise, here, ld);
    } else {
      encode_tile(p, *rowwise, t, out, p.k);
      if (same_blocks) write(*columnwise, out, p.k);
    }
    if (same_blocks) copy_scales(p, *rowwise, *columnwise, t);
  }
  if (!columnwise) return;
  if (!columnwise->transposed) {
    if (!same_blocks) encode_tile(p, *columnwise, t, columnwise->data + t.r0 * p.k + t.c0, p.k);
    return;
  }
  if (!same_blocks) encode_tile(p, *columnwise, t, here, ld);
  p.simd.transpose(here, ld, t.rows, t.cols, columnwise->data + t.c0 * p.m + t.r0, p.m);
}

// Tiles hold whole blocks of every copy (or reach the tensor's edge) and are wide along memory.
void choose_tile(Plan& p, const Copy* rowwise, const Copy* columnwise) {
  int64_t rows = 1, cols = 1;
  for (const Copy* c : {rowwise, columnwise}) {
    if (!c || p.format.one_scale()) continue;
    rows = std::min(std::lcm(rows, c->rows), std::max<int64_t>(p.m, 1));
    cols = std::min(std::lcm(cols, c->cols), std::max<int64_t>(p.k, 1));
    p.staged |= c->rows > 1;
  }
  const auto grow = [](int64_t unit, int64_t wanted, int64_t limit) {
    return std::max(unit, std::min(ceil_div(limit, unit), wanted / unit) * unit);
  };
  if (p.any_transposed) rows = grow(rows, 128, p.m);
  p.tile_cols = grow(cols, kTileElements / std::min(rows, kTileElements), p.k);
  p.tile_rows = grow(rows, kTileElements / std::min(p.tile_cols, kTileElements), p.m);
}

Copy copy_of(const FormatRow& f, const QuantizedView& q, int64_t m, int64_t k, bool square) {
  Copy c{blocked_copy(f, q, m, k)};
  if (!square) return c;
  c.repeat_i = f.block_cols / c.rows;
  c.repeat_j = f.block_cols / c.cols;
  c.rows = c.cols = f.block_cols;
  return c;
}

// Sets the scale of a per-tensor format, given or computed from the amax, and stores it for every copy.
void tensor_scale(const QuantizeArgs& args, Plan& p, std::initializer_list<const Copy*> copies) {
  float inv;
  uint8_t code = 0;
  if (args.scale.given()) {
    p.tensor_scale = *args.scale.as<const float>();
    inv = 1.0f / p.tensor_scale;
  } else {
    if (args.amax_mode == AmaxMode::compute) {
      amaxes_of(p.in, 0, args.amax.as<float>(), nullptr);
      if (p.m == 0 || p.k == 0) p.scale.eps = 0;  // an empty tensor has scale 1, whatever the bound
    }
    p.simd.scales(p.scale, args.amax.as<float>(), 1, &p.tensor_scale, &inv, &code);
  }
  for (const Copy* c : copies) {
    if (!c) continue;
    if (p.format.scale == DType::f32) *static_cast<float*>(c->scale_inv) = inv;
    if (p.format.scale == DType::e8m0) *static_cast<uint8_t*>(c->scale_inv) = code;
  }
}

// Encodes copies tile by tile. `amax`: raised to the tensor's amax; null: not wanted.
void encode(Plan p, const Copy* rowwise, const Copy* columnwise, float* amax) {
  p.any_transposed = columnwise && columnwise->transposed;
  choose_tile(p, rowwise, columnwise);
  const Input& in = p.in;
  const int64_t across = ceil_div(p.k, p.tile_cols), down = ceil_div(p.m, p.tile_rows), tiles = across * down;
  const auto tile = [&](int64_t i) {
    if (p.format.one_scale()) i = tiles - 1 - i;  // backwards: what the amax pass read last is still in cache
    // With a transposed copy, tiles run down the columns, so that the copy's rows are written in whole cache lines.
    const int64_t r0 = (p.any_transposed ? i % down : i / across) * p.tile_rows;
    const int64_t c0 = (p.any_transposed ? i / down : i % across) * p.tile_cols;
    return Tile{r0,
                c0,
                std::min(p.tile_rows, p.m - r0),
                std::min(p.tile_cols, p.k - c0),
                in.staged ? nullptr : in.x.as<const char>() + (r0 * p.k + c0) * bytes(in.dtype),
                p.k,
                nullptr};
  };
  const int64_t run = std::clamp<int64_t>(tiles / 32, 1, 8);  // tiles of a task
  const int64_t tasks = ceil_div(tiles, run);
  std::vector<float> amaxes(amax ? tasks : 0);
  for_tasks(tasks, p.m * p.k >= kThreadedElements, [&](int64_t task) {
    const int64_t end = std::min(tiles, (task + 1) * run);
    for (int64_t i = task * run; i < end; ++i) {
      Tile t = tile(i);
      if (amax) t.amax = &amaxes[task];
      quantize_tile(p, rowwise, columnwise, t);
    }
  });
  for (const float of_task : amaxes) *amax = std::max(*amax, of_task);
}

// Stores the scales of whole rows and columns that have no elements: those of an amax of 0, whatever the bound.
void empty_scales(const Plan& p, const QuantizedView& q) {
  ScaleParams scale = p.scale;
  scale.eps = 0;
  const float amax = 0;
  float by, inv;
  uint8_t code;
  p.simd.scales(scale, &amax, 1, &by, &inv, &code);
  if (p.format.scale == DType::f32) std::fill_n(q.scale_inv.as<float>(), q.scale_inv.numel(), inv);
  if (p.format.scale == DType::e8m0) std::fill_n(q.scale_inv.as<uint8_t>(), q.scale_inv.numel(), code);
}

Status run(const QuantizeArgs& args) {
  const FormatRow& f = row(args.spec.format);
  if ((f.element != DType::e4m3 && f.element != DType::e5m2) ||
      f.scale != (f.rule == ScaleRule::divide ? DType::f32 : DType::e8m0))
    return Status(Code::unsupported, std::string("quantize: the CPU kernels write float8_e4m3fn and float8_e5m2 with "
                                                 "float32 (divide) or float8_e8m0fnu (e8m0_ceil) scales, not ") +
                                         f.name + " (" + name(f.element) + ", " + name(f.scale) + ")");
  const Input in(args.x, args.source);
  Plan p{.simd = kernels(),
         .format = f,
         .scale = {f.rule, row(f.element).max, args.spec.eps, args.spec.has(kPow2), 0},
         .in = in,
         .staged = in.staged,
         .from_rows = args.spec.has(kFromRows)};
  p.scale.value_for_inf = f.one_scale() ? row(DType::f32).max : row(args.x.dtype).max;
  if (args.column_sum.given()) column_sums(in, args.column_sum);

  const bool square = args.spec.has(kSquare);
  Copy copies[2] = {};
  const Copy *rowwise = nullptr, *columnwise = nullptr;
  if (args.rowwise.given()) rowwise = &(copies[0] = copy_of(row(args.rowwise.format), args.rowwise, p.m, p.k, square));
  if (args.columnwise.given())
    columnwise = &(copies[1] = copy_of(row(args.columnwise.format), args.columnwise, p.m, p.k, square));

  if (f.one_scale()) {
    tensor_scale(args, p, {rowwise, columnwise});
    p.bounded = !args.scale.given() && args.amax_mode == AmaxMode::compute;
    if (!(columnwise && columnwise->transposed) &&
        !in.staged) {  // rows do not matter here, and one long row has no ragged ends
      p.k *= p.m;
      p.m = 1;
    }
  }
  // With a given scale, the amax is computed while tiles are encoded, since the scale does not depend on it.
  float* amax = args.scale.given() ? args.amax.as<float>() : nullptr;
  if (amax && args.amax_mode == AmaxMode::compute) *amax = 0.0f;
  if (p.m == 0 || p.k == 0) {
    for (const QuantizedView* q : {&args.rowwise, &args.columnwise})
      if (q->given() && !f.one_scale()) empty_scales(p, *q);
    return Status();
  }
  if ((f.block_rows == 0) == (f.block_cols == 0)) {
    encode(p, rowwise, columnwise, amax);
  } else {  // a tile with whole blocks of both copies would be the whole tensor
    if (rowwise) encode(p, rowwise, nullptr, amax);
    if (columnwise) encode(p, nullptr, columnwise, amax);
  }
  for (Slot slot : {Slot::tile, Slot::bytes, Slot::scales, Slot::row_scales}) scratch(slot).trim(1 << 20);
  return Status();
}

}  // namespace

Status quantize(const QuantizeArgs& args, const Execution&) {
  return guarded("quantize", [&] { return run(args); });
}

}  // namespace diptych::cpu
