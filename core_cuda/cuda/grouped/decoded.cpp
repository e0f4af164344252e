// Products of MXFP8 and NVFP4 on Hopper, whose tensor cores do not take these formats: the kernel of grouped products
// decodes both operands to bfloat16 (NUMERICS 6) in the workspace, just before the products that read them.
#include <algorithm>

#include "cuda/base/device.h"
#include "cuda/grouped/native.h"

namespace diptych::cuda {
namespace {

constexpr int64_t kPart = 256;      // bytes: parts of the workspace begin at multiples of it
constexpr int64_t kFewRows = 1024;  // groups of fewer rows on average read each value seldom: many warps decode
constexpr TileShape kTile = tile_shape(Promotion::none, false);

int64_t whole(int64_t bytes) { return ceil_div(bytes, kPart) * kPart; }

// Returns whether bfloat16 can hold the format's elements times their block scales (NUMERICS 6). For per-tensor formats
// it holds the elements, and the epilogue applies the scale.
bool decodes(const FormatRow& f) {
  if (f.element == DType::e2m1) return f.scale == DType::e4m3 && f.columnwise == ColumnwiseLayout::transposed;
  const bool fp8 = f.element == DType::e4m3 || f.element == DType::e5m2;
  return fp8 && (f.per_tensor() ? f.scale == DType::f32 : f.scale == DType::e8m0);
}

bool suits(const FormatRow& a, const FormatRow& b) {
  return decodes(a) && decodes(b) && !(a.per_tensor() && b.per_tensor());
}

// The layout of the workspace: NativeArgs::units, decoded A, decoded B, each at a multiple of kPart.
struct Workspace {
  int64_t pitch, units_k, units;  // elements from row to row; units along k; number of all units
  int64_t a, b, bytes;            // offsets of decoded A and B; bytes of the whole workspace

  Workspace(int64_t m, int64_t n, int64_t k, int64_t count)
      : pitch(ceil_div(k, 8) * 8),
        units_k(ceil_div(k, kDecodedK)),
        units((ceil_div(m, kDecodedOuter) + count * ceil_div(n, kDecodedOuter)) * units_k),
        a(whole(4 * (units + 2))),
        b(a + whole(m * pitch * 2)),
        bytes(b + whole(count * n * pitch * 2) + kPart) {}
};

Status describe(const char* op, const QuantizedView& each, int64_t outer, int64_t k, unsigned char* to, int64_t pitch,
                DecodedOperand* d) {
  DIPTYCH_TRY(make_operand(op, each, outer, k, &d->each));
  const bool scaled = d->each.kind == ScaleKind::e8m0 || d->each.kind == ScaleKind::e4m3;
  d->to = reinterpret_cast<uint16_t*>(to);
  d->data_step = each.data.numel() * bytes(each.data.dtype);
  d->scale_step = scaled ? each.scale_inv.numel() * bytes(each.scale_inv.dtype) : 0;
  d->pitch = static_cast<int>(pitch);
  d->panels = static_cast<int>(ceil_div(outer, kDecodedOuter));
  return {};
}

// Returns how many units each multiplying warpgroup decodes before it multiplies. Without this help the first tiles
// wait for the decoding warps, longer for a longer k and for transposed operands; measured (docs/performance.md).
int units_ahead(int64_t units_k, int transposed) {
  return static_cast<int>(std::clamp<int64_t>(units_k * (1 + transposed) / 16, 1, 16));
}

// Returns the step from one outer index's amax of a two-level operand to the next; 0 if all share one amax.
int64_t amax_step(const TensorView& amax, int64_t count) { return amax.numel() == count ? 0 : 1; }

// Returns whether D must be stored in pieces, because its rows are not aligned or alpha varies within a tile.
bool in_pieces(const GroupedGemmArgs& args, const NativeShape& s, const NativeArgs& p) {
  const int64_t unit = args.d.dtype == DType::f32 ? 8 : 16;  // bytes that one thread stores
  const bool lines = s.n * bytes(args.d.dtype) % unit == 0 && aligned(args.d.data, unit) &&
                     (args.beta == 0.0f || aligned(args.c.data, unit));
  return !lines || p.a_amax_step != 0 || p.b_amax_step != 0;
}

Status multiply(const char* op, const GroupedGemmArgs& args, const TensorView& workspace, const Execution& exec) {
  const NativeShape s = native_shape(args);
  const bool depth = args.kind == GroupKind::depth;
  const int64_t count = depth || !args.offsets.given() ? 1 : s.groups;
  const Workspace at(s.m, s.n, s.k, count);
  unsigned char* base = workspace.as<unsigned char>();
  base += -reinterpret_cast<uintptr_t>(base) & (kPart - 1);
  NativeArgs p{};
  const QuantizedView b = args.offsets.given() && !depth ? slice(args.b, 0) : args.b;
  DIPTYCH_TRY(describe(op, args.a, s.m, s.k, base + at.a, at.pitch, &p.decoded[0]));
  DIPTYCH_TRY(describe(op, b, s.n, s.k, base + at.b, at.pitch, &p.decoded[1]));
  p.units_ahead = units_ahead(at.units_k, p.decoded[0].each.k_major + p.decoded[1].each.k_major);
  p.units_k = static_cast<int>(at.units_k), p.units = reinterpret_cast<uint32_t*>(base);
  const FormatRow &fa = row(args.a.format), &fb = row(args.b.format);
  if (fa.per_tensor()) p.a_scale = args.a.scale_inv.as<const float>();
  if (fb.per_tensor()) p.b_scale = args.b.scale_inv.as<const float>();
  if (fa.rule == ScaleRule::two_level) {
    p.a_amax = args.a.amax.as<const float>(), p.a_amax_step = amax_step(args.a.amax, 1);
  }
  if (fb.rule == ScaleRule::two_level) {
    p.b_amax = args.b.amax.as<const float>(), p.b_amax_step = amax_step(args.b.amax, count);
    p.b_amax_stack = p.b_amax_step == 0 ? 1 : s.n;
  }
  p.pieces = in_pieces(args, s, p);
  NativeLaunch l{Promotion::none, false, false, false, !depth && s.groups > 1 && s.m / s.groups < kFewRows, 0};
  const NativeOperands from{base + at.a, base + at.b, at.pitch * 2, 2};
  DIPTYCH_TRY(make_native_args(args, s, from, kTile, exec.device.index, &p, &l.blocks));
  if (l.blocks == 0) return {};
  if (l.many) p.units_ahead = 0;
  DIPTYCH_CUDA_TRY(cudaMemsetAsync(base, 0, 4 * (at.units + 2), static_cast<cudaStream_t>(exec.stream)));
  return launch_native_bf16(p, l, exec);
}

// Returns whether tiles and units are few enough to be counted in int32.
bool counts(const GroupedGemmArgs& args) {
  const NativeShape s = native_shape(args);
  if (!native_counts(args, s, 2, kTile)) return false;
  const int64_t count = args.kind == GroupKind::depth ? 1 : s.groups;
  const int64_t panels = ceil_div(s.m, kDecodedOuter) + count * ceil_div(s.n, kDecodedOuter);
  return panels <= kMostExtent / (ceil_div(s.k, kDecodedK) + 1);
}

}  // namespace

// Returns the bytes for decoded A [m, k] and `count` decoded B [n, k]; 0 if this file has no product of the formats.
int64_t decoded_workspace_bytes(FormatId a, FormatId b, int64_t m, int64_t n, int64_t k, int64_t count) {
  if (!suits(row(a), row(b))) return 0;
  return Workspace(m, n, k, count).bytes;
}

bool gemm_decoded_fits(const GemmArgs& args, int arch) {
  const GroupedGemmArgs g = one_group(args);
  return arch == 90 && suits(row(args.a.format), row(args.b.format)) && counts(g);
}

Status gemm_decoded(const GemmArgs& args, const Execution& exec) {
  return multiply("gemm", one_group(args), args.workspace, exec);
}

bool grouped_gemm_decoded_fits(const GroupedGemmArgs& args, int arch) {
  if (arch != 90 || !suits(row(args.a.format), row(args.b.format))) return false;
  // One product instruction takes 16 k.
  if (args.kind == GroupKind::depth && args.align % 16 != 0) return false;
  return counts(args);
}

Status grouped_gemm_decoded(const GroupedGemmArgs& args, const Execution& exec) {
  return multiply("grouped_gemm", args, args.workspace, exec);
}

}  // namespace diptych::cuda
