// D = alpha * A @ B.T + bias + beta * C on the CPU, with the bits that NUMERICS 7 defines.
//
// Payloads are decoded to float32 panels once; register tiles then run over k, and every output element has the same
// sequence of operations however the work is divided.
#include "cpu/gemm/product.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "cpu/base/run.h"
#include "cpu/base/scratch.h"
#include "cpu/isa/isa.h"

namespace diptych::cpu {
namespace {

constexpr int64_t kTaskTiles = 4;          // micro-tiles of a task along m
constexpr int64_t kTaskCols = 256;         // columns of a task
constexpr int64_t kDepth = 256;            // k per pass over a task: its panels stay in the second-level cache
constexpr int64_t kPanelFloats = 1 << 22;  // bound of one operand's decoded chunk, unless K alone exceeds it

// A product with values that are derived from it.
struct Job : Product {
  explicit Job(const Product& p)
      : Product(p),
        block0(whole ? 0 : k.begin / block),
        blocks(k.length > 0 ? (whole ? 1 : ceil_div(k.begin + k.length, block) - block0) : 0),
        head(whole ? 0 : std::min((block - k.begin % block) % block, k.length)) {}

  const Kernels& simd = kernels();
  int64_t block0, blocks;  // along k
  int64_t head;            // elements in the first block, if that begins before k.begin
  const float* biases = nullptr;
};

struct Packed {   // panels of an operand's rows, decoded, and their scales
  float* panels;  // [panel, k, width]
  float* scales;  // [panel, blocks, width]
};

struct Chunk {  // rows m0 .. m0 + m of A against rows n0 .. n0 + n of B
  int64_t m0, m, n0, n;
  Packed a, b;
};

int64_t round_up(int64_t v, int64_t unit) { return ceil_div(v, unit) * unit; }

// ((alpha * amax_a) * amax_b) * unit
void set_alpha(const Job& p, int64_t i, int64_t j, Epilogue& e) {
  e.alpha = p.a.times_amax(p.alpha, i);
  e.unit = kAmaxUnit[(p.a.amax != nullptr) + (p.b.amax != nullptr)];
  if (p.b.amax_each) {
    e.amax = p.b.amax + j;
  } else if (p.a.amax || p.b.amax) {
    e.alpha = p.b.times_amax(e.alpha, j) * e.unit;
  }
}

void finish_tile(const Job& p, const Chunk& c, int64_t i0, int64_t rows, int64_t j0, int64_t cols, const float* acc) {
  const int64_t size = bytes(p.d_type);
  Epilogue e{};
  e.beta = p.beta;
  e.dtype = p.d_type;
  if (p.biases) e.bias = p.biases + c.n0 + j0;
  if (p.whole && p.k.length > 0) e.sb = c.b.scales + j0;  // a panel has nr scales, one for each column
  for (int64_t i = 0; i < rows; ++i, acc += p.simd.nr) {
    const int64_t row = p.m0 + c.m0 + i0 + i, at = (row * p.n + c.n0 + j0) * size;
    set_alpha(p, row, c.n0 + j0, e);
    if (e.sb) e.sa = c.a.scales[i0 / p.simd.mr * p.simd.a_width + i];
    e.d = static_cast<char*>(p.d) + at;
    if (p.beta != 0.0f) e.c = static_cast<const char*>(p.c) + at;
    p.simd.epilogue(e, acc, cols);
  }
}

// Computes a block of D, `tiles` micro-tiles down and `panels` across, over all of k.
void run_task(const Job& p, const Chunk& c, int64_t i0, int64_t rows, int64_t j0, int64_t cols) {
  const int mr = p.simd.mr, nr = p.simd.nr, a_width = p.simd.a_width;
  const int64_t tiles = ceil_div(rows, mr), panels = ceil_div(cols, nr), tile_size = mr * nr;
  float* acc = scratch(Slot::panels).get<float>(tiles * panels * tile_size);
  std::memset(acc, 0, tiles * panels * tile_size * sizeof(float));

  const int64_t step = p.whole ? kDepth : std::max(p.block, kDepth / p.block * p.block);
  for (int64_t k0 = 0, depth; k0 < p.k.length; k0 += depth) {
    depth = k0 < p.head ? p.head : std::min(step, p.k.length - k0);
    if (k0 > 0) poll();
    const int64_t block = p.whole ? 0 : (p.k.begin + k0) / p.block - p.block0;
    for (int64_t j = 0; j < panels; ++j) {
      const float* b = c.b.panels + ((j0 / nr + j) * p.k.length + k0) * nr;
      const float* sb = c.b.scales + ((j0 / nr + j) * p.blocks + block) * nr;
      for (int64_t i = 0; i < tiles; ++i) {
        const float* a = c.a.panels + ((i0 / mr + i) * p.k.length + k0) * a_width;
        const int height = static_cast<int>(std::min<int64_t>(mr, rows - i * mr));
        float* out = acc + (j * tiles + i) * tile_size;
        if (p.whole) {
          p.simd.tile(height, a, b, depth, out);
        } else {
          const float* sa = c.a.scales + ((i0 / mr + i) * p.blocks + block) * a_width;
          p.simd.tile_blocked(height, a, b, depth, p.block, sa, sb, out);
        }
      }
    }
  }
  for (int64_t i = 0; i < tiles; ++i)
    for (int64_t j = 0; j < panels; ++j)
      finish_tile(p, c, i0 + i * mr, std::min<int64_t>(mr, rows - i * mr), j0 + j * nr,
                  std::min<int64_t>(nr, cols - j * nr), acc + (j * tiles + i) * tile_size);
}

// Packs panel i of the operand's n rows from `first` on; a panel has `step` rows.
void pack(const Job& p, const Operand& o, int64_t first, int64_t n, int64_t i, int step, int width, const Packed& to) {
  const int64_t row = i * step, rows = std::min<int64_t>(step, n - row);
  pack_panel(p.simd, o, first + row, rows, p.k, width, to.panels + i * width * p.k.length);
  pack_scales(o, first + row, rows, width, p.block, p.block0, p.blocks, to.scales + i * width * p.blocks);
}

}  // namespace

void multiply(const Product& product, bool threaded) {
  Job p(product);
  const int mr = p.simd.mr, nr = p.simd.nr, a_width = p.simd.a_width;
  const int64_t at_most = std::max<int64_t>(kTaskCols, kPanelFloats / std::max<int64_t>(p.k.length, 4096));
  const int64_t chunk_m = std::min(p.m, at_most / mr * mr), chunk_n = std::min(p.n, at_most / nr * nr);

  // One allocation: panels of A, panels of B, scales of A, scales of B, bias.
  const int64_t a_rows = ceil_div(chunk_m, mr) * a_width, b_rows = round_up(chunk_n, nr);
  const int64_t b_at = round_up(a_rows * p.k.length, 16), sa_at = b_at + b_rows * p.k.length,
                sb_at = sa_at + a_rows * p.blocks;
  const int64_t bias_at = sb_at + b_rows * p.blocks, bias_floats = p.bias ? p.n : 0;
  float* memory = scratch(Slot::packed).get<float>(bias_at + bias_floats);
  Chunk c{};
  c.a = {memory, memory + sa_at};
  c.b = {memory + b_at, memory + sb_at};
  if (p.bias) {
    p.simd.load(p.bias_type, p.bias, p.n, memory + bias_at);
    p.biases = memory + bias_at;
  }

  for (c.n0 = 0; c.n0 < p.n; c.n0 += chunk_n) {
    c.n = std::min(chunk_n, p.n - c.n0);
    for (c.m0 = 0; c.m0 < p.m; c.m0 += chunk_m) {
      c.m = std::min(chunk_m, p.m - c.m0);
      const bool fresh_b = c.m0 == 0, fresh_a = c.n0 == 0 || chunk_m < p.m;
      const int64_t a_panels = fresh_a ? ceil_div(c.m, mr) : 0, b_panels = fresh_b ? ceil_div(c.n, nr) : 0;
      for_tasks(a_panels + b_panels, threaded, [&](int64_t i) {
        if (i < a_panels) {
          pack(p, p.a, p.m0 + c.m0, c.m, i, mr, a_width, c.a);
        } else {
          pack(p, p.b, c.n0, c.n, i - a_panels, nr, nr, c.b);
        }
      });
      const int64_t across = ceil_div(c.n, kTaskCols), task_rows = kTaskTiles * mr;
      for_tasks(ceil_div(c.m, task_rows) * across, threaded, [&](int64_t i) {
        const int64_t i0 = i / across * task_rows, j0 = i % across * kTaskCols;
        run_task(p, c, i0, std::min(task_rows, c.m - i0), j0, std::min(kTaskCols, c.n - j0));
      });
    }
  }
  scratch(Slot::packed).trim(64 << 20);
}

Status plan(const char* op, const QuantizedView& a, const QuantizedView& b, Product& p) {
  p.a = operand(a), p.b = operand(b);
  for (const Operand* o : {&p.a, &p.b})
    if (o->element != DType::e4m3 && o->element != DType::e5m2 && o->element != DType::e2m1)
      return {Code::unsupported, std::string(op) +
                                     ": the CPU kernels multiply float8_e4m3fn, float8_e5m2 and float4_e2m1fn, not " +
                                     name(o->element)};
  const int64_t fine = std::min(p.a.block_k, p.b.block_k), coarse = std::max(p.a.block_k, p.b.block_k);
  if (fine > 0 && coarse % fine != 0)
    return {Code::unsupported, std::string(op) + ": blocks of " + std::to_string(p.a.block_k) + " and " +
                                   std::to_string(p.b.block_k) + " along k do not nest (" + row(a.format).name + ", " +
                                   row(b.format).name + ")"};
  p.k = {0, p.a.k};
  p.whole = coarse == 0;
  p.block = fine > 0 ? fine : coarse > 0 ? coarse : std::max<int64_t>(p.a.k, 1);
  return {};
}

}  // namespace diptych::cpu
