// The host's side of the native kernel for sm_90: which operands it accepts, which tiles it uses, and how its arguments
// are made. A dense product is one group.
#include "cuda/products/sm90.h"

#include <algorithm>
#include <bit>
#include <string>

#include "cuda/base/device.h"
#include "cuda/base/tensor_map.h"

namespace diptych::cuda {
namespace {

constexpr int64_t kAlign = 16;                             // bytes: alignment of addresses and strides
constexpr int64_t kMostTiles = (int64_t{1} << 31) - 1024;  // tiles are counted in int32

// Returns whether the kernel supports the format's elements and scales.
bool suits(const FormatRow& f) {
  const bool fp8 = f.element == DType::e4m3 || f.element == DType::e5m2;
  const bool block = f.block_cols == kNativeTileK && (f.block_rows == 1 || f.block_rows == 128);
  return fp8 && f.scale == DType::f32 && f.columnwise == ColumnwiseLayout::transposed && (f.one_scale() || block);
}

Promotion promotion_of(const GroupedGemmArgs& args) {
  if (row(args.a.format).one_scale()) return args.options.fast_accum ? Promotion::none : Promotion::plain;
  return row(args.b.format).block_rows == 128 ? Promotion::columns : Promotion::full;
}

// Returns the most pairs of tiles that any offsets can make. A tile without a neighbour counts as a pair.
int64_t most_pairs(const GroupedGemmArgs& args, const NativeShape& s, TileShape tile) {
  const int64_t rows = tile.beside() ? tile.m : 2 * tile.m;  // of D in a pair
  const int64_t columns = ceil_div(s.n, tile.beside() ? 2 * tile.n : tile.n);
  return columns * (args.kind == GroupKind::depth ? ceil_div(s.m, rows) * s.groups : s.rows / rows + s.groups + 2);
}

// The elements of D that tiles cover for one m x n, those past its edges included.
int64_t covered(int64_t m, int64_t n, TileShape tile) {
  return ceil_div(m, tile.m) * tile.m * ceil_div(n, tile.n) * tile.n;
}

// Returns whether tall tiles take less time than wide ones. At equal covers they take 0.95 to 0.98 of it. Groups of
// rows that tall tiles do not divide would pay more for their last tiles, and the host does not know their sizes.
bool prefers_tall(const GroupedGemmArgs& args, const NativeShape& s, Promotion promotion) {
  if (promotion == Promotion::none) return false;
  if (!args.offsets.given()) return true;
  if (args.kind == GroupKind::rows) return false;
  return covered(s.m, s.n, tile_shape(promotion, true)) * 100 <= covered(s.m, s.n, tile_shape(promotion, false)) * 103;
}

// Returns whether D must be stored by single elements, because its rows or C's are not aligned.
bool rows_unaligned(const GroupedGemmArgs& args, const NativeShape& s) {
  const bool lines = s.n * bytes(args.d.dtype) % kAlign == 0 && aligned(args.d.data, kAlign);
  return !lines || (args.beta != 0.0f && !aligned(args.c.data, kAlign));
}

int shift_of(const FormatRow& f) { return f.one_scale() ? 0 : std::countr_zero(static_cast<unsigned>(f.block_rows)); }

}  // namespace

NativeShape native_shape(const GroupedGemmArgs& args) {
  const FormatRow& f = row(args.a.format);
  const bool rows_last = args.a.columnwise && f.columnwise == ColumnwiseLayout::row_major;
  const int64_t k = rows_last ? args.a.data.rows() : args.a.data.cols() * f.pack(), n = args.d.cols();
  const int64_t groups = args.offsets.given() ? args.offsets.numel() - 1 : 1;
  if (args.kind == GroupKind::depth) return {groups, k, args.d.shape[1], n, k};
  return {groups, args.d.rows(), args.d.rows(), n, k};
}

bool native_counts(const GroupedGemmArgs& args, const NativeShape& s, int element_bytes, TileShape tile) {
  if (s.groups > kNativeMaxGroups || s.rows <= 0 || s.m <= 0 || s.n <= 0 || s.k <= 0) return false;
  if (std::max({s.rows, s.m, s.n, s.k}) > kMostTiles / element_bytes) return false;
  if (s.n > kMostTiles / bytes(args.d.dtype)) return false;  // the copy engine's coordinates count bytes
  return most_pairs(args, s, tile) <= kMostTiles && tensor_maps_available();
}

Status make_native_args(const GroupedGemmArgs& args, const NativeShape& s, const NativeOperands& from, TileShape tile,
                        int device, NativeArgs* p, int64_t* blocks) {
  *blocks =
      std::min<int64_t>(device_info(device).sm_count / kNativeCluster, most_pairs(args, s, tile)) * kNativeCluster;
  if (*blocks == 0) return {};  // D is empty and may have no address, which the driver's maps want
  const bool depth = args.kind == GroupKind::depth;
  const int32_t a_box[2] = {kNativeTileK, tile.m / 2}, b_box[3] = {kNativeTileK, tile.n / 2, 1};
  // A stack without groups is never read; the map still wants a base and an extent.
  const bool stack = s.groups > 0 && !depth;
  const int64_t a_extents[2] = {from.pitch, s.m}, b_extents[3] = {from.pitch, s.n, stack ? s.groups : 1};
  DIPTYCH_TRY(make_tensor_map(&p->a, from.a, 2, a_extents, a_box));
  DIPTYCH_TRY(make_tensor_map(&p->b, stack || depth ? from.b : from.a, 3, b_extents, b_box));
  p->offsets = args.offsets.given() ? args.offsets.as<const int32_t>() : nullptr;
  p->groups = static_cast<int>(s.groups), p->rows = static_cast<int>(s.rows), p->depth = depth;
  p->element_bytes = from.element_bytes;
  p->m = depth ? static_cast<int>(s.m) : 0, p->n = static_cast<int>(s.n);
  p->k = depth ? 0 : static_cast<int>(s.k * from.element_bytes);
  p->d_rows = depth ? static_cast<int>(args.d.shape[1]) : 0, p->d_pitch = static_cast<int>(args.d.cols());
  p->before = 0, p->last = true;
  p->columns = static_cast<int>(ceil_div(s.n, tile.n));
  p->d = args.d.data, p->c = args.beta != 0.0f ? args.c.data : nullptr;
  p->bias = args.bias.given() ? args.bias.data : nullptr;
  p->d_type = args.d.dtype, p->bias_type = args.bias.dtype;
  p->alpha = args.alpha, p->beta = args.beta;
  if (from.element_bytes == 1 && !p->pieces) {
    const int64_t d_extents[3] = {s.n * bytes(args.d.dtype), s.m, depth ? std::max<int64_t>(1, s.groups) : 1};
    const int32_t d_box[3] = {128, 64, 1};
    DIPTYCH_TRY(make_tensor_map(&p->d_map, args.d.data, 3, d_extents, d_box));
    if (args.d.dtype == DType::f32 && p->c) DIPTYCH_TRY(make_tensor_map(&p->c_map, args.c.data, 3, d_extents, d_box));
  }
  return {};
}

bool grouped_gemm_native_fits(const GroupedGemmArgs& args) {
  const FormatRow &fa = row(args.a.format), &fb = row(args.b.format);
  if (!suits(fa) || !suits(fb) || fa.one_scale() != fb.one_scale()) return false;
  const NativeShape s = native_shape(args);
  if (s.k % kAlign != 0) return false;
  // One product instruction takes 32 k, and each block scale covers 128 k.
  if (args.kind == GroupKind::depth && args.align % (fa.one_scale() ? 32 : kNativeTileK) != 0) return false;
  if (args.offsets.given() && rows_unaligned(args, s)) return false;
  if (!aligned(args.a.data.data, kAlign) || !aligned(args.b.data.data, kAlign)) return false;
  const Promotion promotion = promotion_of(args);
  return native_counts(args, s, 1, tile_shape(promotion, prefers_tall(args, s, promotion)));
}

Status multiply_native(const GroupedGemmArgs& args, bool tall, const Execution& exec) {
  const Promotion promotion = promotion_of(args);
  tall = tall && promotion != Promotion::none;
  const FormatRow &fa = row(args.a.format), &fb = row(args.b.format);
  const NativeShape s = native_shape(args);
  NativeArgs p{};
  p.pieces = rows_unaligned(args, s);
  if (p.pieces && !tall && promotion != Promotion::none)
    return {Code::unsupported,
            "grouped_gemm: wide tiles with partial sums cannot store rows of D that are not aligned"};
  NativeLaunch l{promotion, tall, fa.element == DType::e5m2, fb.element == DType::e5m2, false, 0};
  const NativeOperands from{args.a.data.data, args.b.data.data, s.k, 1};
  DIPTYCH_TRY(make_native_args(args, s, from, tile_shape(l.promotion, l.tall), exec.device.index, &p, &l.blocks));
  p.a_scale = args.a.scale_inv.as<const float>(), p.b_scale = args.b.scale_inv.as<const float>();
  p.a_shift = shift_of(fa), p.b_shift = shift_of(fb);
  p.scale_k = static_cast<int>(ceil_div(s.k, kNativeTileK));
  p.whole_scales = p.scale_k % 4 == 0 && aligned(p.a_scale, kAlign) && aligned(p.b_scale, kAlign);
  p.b_scale_stack = fb.one_scale() ? 1 : ceil_div(s.n, fb.block_rows) * p.scale_k;
  if (l.blocks == 0) return {};
  return fa.one_scale() ? launch_native_tensor(p, l, exec) : launch_native_block(p, l, exec);
}

Status grouped_gemm_native(const GroupedGemmArgs& args, const Execution& exec) {
  return multiply_native(args, prefers_tall(args, native_shape(args), promotion_of(args)), exec);
}

GroupedGemmArgs one_group(const GemmArgs& args) {
  GroupedGemmArgs g;
  g.a = args.a, g.b = args.b, g.d = args.d, g.c = args.c, g.bias = args.bias;
  g.alpha = args.alpha, g.beta = args.beta, g.options = args.options;
  return g;
}

bool gemm_native_fits(const GemmArgs& args) { return grouped_gemm_native_fits(one_group(args)); }

// Returns true if D fills at least this part of the tiles that all SMs compute in the waves that the product takes: its
// tiles have one size, while cuBLASLt chooses among several and may divide k. The bounds come from the times of both
// kernels on a grid of shapes (`python -m benchmarks --only rule`; docs/performance.md).
bool gemm_native_pays(const GemmArgs& args) {
  const GroupedGemmArgs g = one_group(args);
  const Promotion promotion = promotion_of(g);
  if (promotion == Promotion::none || !grouped_gemm_native_fits(g)) return false;
  const TileShape tile = tile_shape(promotion, true);
  const NativeShape s = native_shape(g);
  const int64_t at_once = device_info(args.d.device.index).sm_count / kNativeCluster * kNativeCluster;
  const int64_t waves = ceil_div(ceil_div(s.m, tile.m) * ceil_div(s.n, 2 * tile.n) * 2, at_once);
  // Where C is added, cuBLASLt's product is finished by another kernel.
  const double least = args.beta != 0.0f ? 0.70 : promotion == Promotion::columns ? 0.80 : 0.92;
  return static_cast<double>(s.m) * s.n >= least * waves * at_once * tile.m * tile.n;
}

Status gemm_native(const GemmArgs& args, const Execution& exec) { return grouped_gemm_native(one_group(args), exec); }

}  // namespace diptych::cuda
