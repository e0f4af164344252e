// The host's side of the native grouped kernel: which operands it accepts, and how its arguments are made.
#include "cuda/grouped/native.h"

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
  return fp8 && f.scale == DType::f32 && f.columnwise == ColumnwiseLayout::transposed && (f.per_tensor() || block);
}

Promotion promotion_of(const GroupedGemmArgs& args) {
  if (row(args.a.format).per_tensor()) return args.options.fast_accum ? Promotion::none : Promotion::plain;
  return row(args.b.format).block_rows == 128 ? Promotion::columns : Promotion::full;
}

// Returns the most pairs of tiles along m that any offsets can make; an odd tile counts as a pair.
int64_t most_pairs(const GroupedGemmArgs& args, const NativeShape& s) {
  constexpr int64_t kPair = 2 * kNativeTileM;
  return args.kind == GroupKind::depth ? ceil_div(s.m, kPair) * s.groups : s.rows / kPair + s.groups + 2;
}

int shift_of(const FormatRow& f) { return f.per_tensor() ? 0 : std::countr_zero(static_cast<unsigned>(f.block_rows)); }

}  // namespace

NativeShape native_shape(const GroupedGemmArgs& args) {
  const FormatRow& f = row(args.a.format);
  const bool rows_last = args.a.columnwise && f.columnwise == ColumnwiseLayout::row_major;
  const int64_t k = rows_last ? args.a.data.rows() : args.a.data.cols() * f.pack(), n = args.d.cols();
  const int64_t groups = args.offsets.given() ? args.offsets.numel() - 1 : 1;
  if (args.kind == GroupKind::depth) return {groups, k, args.d.shape[1], n, k};
  return {groups, args.d.rows(), args.d.rows(), n, k};
}

bool native_counts(const GroupedGemmArgs& args, const NativeShape& s, int element_bytes, int tile_n) {
  if (s.groups > kNativeMaxGroups || s.rows <= 0 || s.m <= 0 || s.n <= 0 || s.k <= 0) return false;
  if (std::max({s.rows, s.m, s.n, s.k}) > kMostTiles / element_bytes) return false;
  return most_pairs(args, s) <= kMostTiles / ceil_div(s.n, tile_n) && tensor_maps_available();
}

Status make_native_args(const GroupedGemmArgs& args, const NativeShape& s, const NativeOperands& from, int tile_n,
                        int device, NativeArgs* p, int64_t* blocks) {
  const bool depth = args.kind == GroupKind::depth;
  const int32_t a_box[2] = {kNativeTileK, kNativeTileM / 2}, b_box[3] = {kNativeTileK, tile_n / 2, 1};
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
  p->columns = static_cast<int>(ceil_div(s.n, tile_n));
  p->d = args.d.data, p->c = args.beta != 0.0f ? args.c.data : nullptr;
  p->bias = args.bias.given() ? args.bias.data : nullptr;
  p->d_type = args.d.dtype, p->bias_type = args.bias.dtype;
  p->alpha = args.alpha, p->beta = args.beta;
  if (args.d.dtype == DType::f32 && from.element_bytes == 1) {
    const int64_t d_extents[3] = {s.n * 4, s.m, depth ? std::max<int64_t>(1, s.groups) : 1};
    const int32_t d_box[3] = {128, 64, 1};
    DIPTYCH_TRY(make_tensor_map(&p->d_map, args.d.data, 3, d_extents, d_box));
    if (p->c) DIPTYCH_TRY(make_tensor_map(&p->c_map, args.c.data, 3, d_extents, d_box));
  }
  const int64_t clusters =
      std::min<int64_t>(device_info(device).sm_count / kNativeCluster, most_pairs(args, s) * p->columns);
  *blocks = clusters * kNativeCluster;
  return {};
}

bool grouped_gemm_native_fits(const GroupedGemmArgs& args, int arch) {
  const FormatRow &fa = row(args.a.format), &fb = row(args.b.format);
  if (arch != 90 || !suits(fa) || !suits(fb) || fa.per_tensor() != fb.per_tensor()) return false;
  const NativeShape s = native_shape(args);
  if (s.k % kAlign != 0 || s.n % kAlign != 0) return false;
  // One product instruction takes 32 k, and each block scale covers 128 k.
  if (args.kind == GroupKind::depth && args.align % (fa.per_tensor() ? 32 : kNativeTileK) != 0) return false;
  for (const TensorView* t : {&args.a.data, &args.b.data, &args.d, &args.c})
    if (t->given() && !aligned(t->data, kAlign)) return false;
  return native_counts(args, s, 1, native_tile_n(promotion_of(args)));
}

Status grouped_gemm_native(const GroupedGemmArgs& args, const Execution& exec) {
  const FormatRow &fa = row(args.a.format), &fb = row(args.b.format);
  const NativeShape s = native_shape(args);
  NativeArgs p{};
  NativeLaunch l{promotion_of(args), fa.element == DType::e5m2, fb.element == DType::e5m2, 0};
  const NativeOperands from{args.a.data.data, args.b.data.data, s.k, 1};
  DIPTYCH_TRY(make_native_args(args, s, from, native_tile_n(l.promotion), exec.device.index, &p, &l.blocks));
  p.a_scale = args.a.scale_inv.as<const float>(), p.b_scale = args.b.scale_inv.as<const float>();
  p.a_shift = shift_of(fa), p.b_shift = shift_of(fb);
  p.scale_k = static_cast<int>(ceil_div(s.k, kNativeTileK));
  p.whole_scales = p.scale_k % 4 == 0 && aligned(p.a_scale, kAlign) && aligned(p.b_scale, kAlign);
  p.b_scale_stack = fb.per_tensor() ? 1 : ceil_div(s.n, fb.block_rows) * p.scale_k;
  if (l.blocks == 0) return {};
  return fa.per_tensor() ? launch_native_tensor(p, l, exec) : launch_native_block(p, l, exec);
}

}  // namespace diptych::cuda
