// Products of MXFP8 and NVFP4 on Hopper, whose tensor cores do not take these formats: the kernel of grouped products
// decodes both operands to bfloat16 (NUMERICS 6) in the workspace, just before the products that read them.
#include <algorithm>

#include "cuda/base/device.h"
#include "cuda/products/sm90.h"

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
  return fp8 && (f.one_scale() ? f.scale == DType::f32 : f.scale == DType::e8m0);
}

bool suits(const FormatRow& a, const FormatRow& b) {
  return decodes(a) && decodes(b) && !(a.one_scale() && b.one_scale());
}

// A product whose decoded operands take more than kMost bytes is cut into pieces: whole launches, one after the other,
// each of which decodes what it reads. Pieces begin at multiples of kCut along M and N: kCut x kCut are 128 tiles,
// about one for each SM, and fewer leave SMs idle all along K. At a long K pieces have kLeast rows and columns
// together, whatever bytes these take: of fewer, each value is read too seldom, and tiles wait for the decoding warps.
constexpr int64_t kMost = int64_t{3} << 29, kCut = 2048, kLeast = 8192;

int64_t pitch_of(int64_t k) { return ceil_div(k, 8) * 8; }  // elements

// The extents of a product's largest piece. Groups of rows are cut between groups, since the host knows no other
// boundary of theirs, so that decoded A stays whole. Other products are cut along M and N.
struct Cut {
  int64_t m, n, groups;

  Cut(int64_t m_, int64_t n_, int64_t k, int64_t groups_, bool by_groups) : m(m_), n(n_), groups(groups_) {
    const int64_t line = std::max<int64_t>(1, 2 * pitch_of(k));
    if (by_groups) {
      const int64_t most = std::max<int64_t>(1, kMost / std::max<int64_t>(1, n * line));
      const int64_t all = std::max<int64_t>(1, groups_);
      groups = ceil_div(all, ceil_div(all, most));  // pieces of about one size
      return;
    }
    groups = 1;
    const int64_t lines = std::max(kMost / line, kLeast), half = lines / 2 / kCut * kCut;
    if (m + n <= lines) return;
    const auto beside = [&](int64_t other) { return (lines - std::min(other, half)) / kCut * kCut; };
    m = n_ > half ? std::min(m_, half) : std::min(m_, beside(n_));
    n = std::min(n_, beside(m_));
  }
};

// The layout of the workspace: NativeArgs::units, decoded A, decoded B, each at a multiple of kPart.
struct Workspace {
  int64_t pitch, units_k, units;  // elements from row to row; units along k; number of all units
  int64_t a, b, bytes;            // offsets of decoded A and B; bytes of the whole workspace

  Workspace(int64_t m, int64_t n, int64_t k, int64_t count)
      : pitch(pitch_of(k)),
        units_k(ceil_div(k, kDecodedK)),
        units((ceil_div(m, kDecodedOuter) + count * ceil_div(n, kDecodedOuter)) * units_k),
        a(whole(4 * (units + 2))),
        b(a + whole(m * pitch * 2)),
        bytes(b + whole(count * n * pitch * 2) + kPart) {}
};

// A piece of a product: ranges of D's rows and columns, or of groups.
struct Piece {
  int64_t m0, m, n0, n, g0, groups;
};

Status describe(const char* op, const QuantizedView& each, int64_t outer, int64_t k, int64_t first, int64_t rows,
                unsigned char* to, int64_t pitch, DecodedOperand* d) {
  DIPTYCH_TRY(make_operand(op, each, outer, k, &d->each));
  const bool scaled = d->each.kind == ScaleKind::e8m0 || d->each.kind == ScaleKind::e4m3;
  d->to = reinterpret_cast<uint16_t*>(reinterpret_cast<uintptr_t>(to) - first * pitch * 2);
  d->pitch = static_cast<int>(pitch);
  d->data_step = each.data.numel() * bytes(each.data.dtype);
  d->scale_step = scaled ? each.scale_inv.numel() * bytes(each.scale_inv.dtype) : 0;
  d->first = static_cast<int>(first), d->rows = static_cast<int>(rows);
  d->panels = static_cast<int>(ceil_div(rows, kDecodedOuter));
  return {};
}

// Returns how many units each multiplying warpgroup decodes before it multiplies. Without this help the first tiles
// wait for the decoding warps, longer for a longer k and for transposed operands; measured (docs/performance.md).
int units_ahead(int64_t units_k, int transposed) {
  return static_cast<int>(std::clamp<int64_t>(units_k * (1 + transposed) / 16, 1, 16));
}

// Returns the step from one outer index's amax of a two-level operand to the next; 0 if all share one amax.
int64_t amax_step(const TensorView& amax, int64_t count) { return amax.numel() == count ? 0 : 1; }

// Returns whether D must be stored by single elements, because its rows are not aligned or alpha varies within a tile.
bool in_pieces(const GroupedGemmArgs& args, const NativeArgs& p) {
  const int64_t unit = args.d.dtype == DType::f32 ? 8 : 16;  // bytes that one thread stores
  const bool lines = args.d.cols() * bytes(args.d.dtype) % unit == 0 && aligned(args.d.data, unit) &&
                     (args.beta == 0.0f || aligned(args.c.data, unit));
  return !lines || p.a_amax_step != 0 || p.b_amax_step != 0;
}

void move_by(TensorView& t, int64_t elements) {
  if (t.data) t.data = static_cast<char*>(t.data) + elements * bytes(t.dtype);
}

Status multiply_piece(const char* op, GroupedGemmArgs args, const NativeShape& whole, const Piece& cut,
                      const Execution& exec) {
  const bool depth = args.kind == GroupKind::depth, grouped = args.offsets.given() && !depth;
  const int64_t stack = grouped ? whole.groups : 1, count = grouped ? cut.groups : 1;  // weights; those of the piece
  const Workspace at(cut.m, cut.n, whole.k, count);
  unsigned char* base = args.workspace.as<unsigned char>();
  base += -reinterpret_cast<uintptr_t>(base) & (kPart - 1);
  NativeArgs p{};
  const QuantizedView b = grouped ? slice(args.b, cut.g0) : args.b;
  DIPTYCH_TRY(describe(op, args.a, whole.m, whole.k, cut.m0, cut.m, base + at.a, at.pitch, &p.decoded[0]));
  DIPTYCH_TRY(describe(op, b, whole.n, whole.k, cut.n0, cut.n, base + at.b, at.pitch, &p.decoded[1]));
  p.units_ahead = units_ahead(at.units_k, p.decoded[0].each.k_major + p.decoded[1].each.k_major);
  p.units_k = static_cast<int>(at.units_k), p.units = reinterpret_cast<uint32_t*>(base);
  const FormatRow &fa = row(args.a.format), &fb = row(args.b.format);
  if (fa.one_scale()) p.a_scale = args.a.scale_inv.as<const float>();
  if (fb.one_scale()) p.b_scale = b.scale_inv.as<const float>();
  if (fa.rule == ScaleRule::two_level) {
    p.a_amax_step = amax_step(args.a.amax, 1);
    p.a_amax = args.a.amax.as<const float>() + cut.m0 * p.a_amax_step;
  }
  if (fb.rule == ScaleRule::two_level) {
    p.b_amax_step = amax_step(args.b.amax, stack);
    p.b_amax = b.amax.as<const float>() + cut.n0 * p.b_amax_step;
    p.b_amax_stack = p.b_amax_step == 0 ? 1 : whole.n;
  }
  p.pieces = in_pieces(args, p);
  const bool many = !depth && whole.groups > 1 && whole.m / whole.groups < kFewRows;
  NativeLaunch l{Promotion::none, false, false, false, many, 0};
  const NativeOperands from{base + at.a, base + at.b, at.pitch * 2, 2};
  for (TensorView* t : {&args.d, &args.c}) move_by(*t, cut.m0 * whole.n + cut.n0);
  move_by(args.bias, cut.g0 * whole.n + cut.n0);
  const NativeShape s{depth ? whole.groups : cut.groups, depth ? whole.rows : cut.m, cut.m, cut.n, whole.k};
  DIPTYCH_TRY(make_native_args(args, s, from, kTile, exec.device.index, &p, &l.blocks));
  if (l.blocks == 0) return {};
  p.before = static_cast<int>(cut.g0), p.last = cut.g0 + cut.groups >= whole.groups;
  if (l.many) p.units_ahead = 0;
  DIPTYCH_CUDA_TRY(cudaMemsetAsync(base, 0, 4 * (at.units + 2), static_cast<cudaStream_t>(exec.stream)));
  return launch_native_bf16(p, l, exec);
}

Status multiply(const char* op, const GroupedGemmArgs& args, const Execution& exec) {
  const NativeShape s = native_shape(args);
  const bool grouped = args.kind == GroupKind::rows && args.offsets.given();
  const Cut cut(s.m, s.n, s.k, s.groups, grouped);
  const int64_t groups = grouped ? s.groups : 1;
  for (int64_t g = 0; g == 0 || g < groups; g += cut.groups) {  // without a group, too, rows of D become zeros
    for (int64_t m = 0; m < s.m; m += cut.m) {
      for (int64_t n = 0; n < s.n; n += cut.n) {
        const Piece piece{m, std::min(cut.m, s.m - m),        n, std::min(cut.n, s.n - n),
                          g, std::min(cut.groups, groups - g)};
        DIPTYCH_TRY(multiply_piece(op, args, s, piece, exec));
      }
    }
  }
  return {};
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

// Returns the bytes for the decoded operands of the largest piece of A [m, k] times B [n, k], or times a stack of
// `groups` B by groups of rows; 0 if this file has no product of the formats.
int64_t decoded_workspace_bytes(FormatId a, FormatId b, int64_t m, int64_t n, int64_t k, int64_t groups,
                                bool by_groups) {
  if (!suits(row(a), row(b))) return 0;
  const Cut cut(m, n, k, groups, by_groups);
  return Workspace(cut.m, cut.n, k, cut.groups).bytes;
}

bool gemm_decoded_fits(const GemmArgs& args) {
  return suits(row(args.a.format), row(args.b.format)) && counts(one_group(args));
}

Status gemm_decoded(const GemmArgs& args, const Execution& exec) {
  GroupedGemmArgs g = one_group(args);
  g.workspace = args.workspace;
  return multiply("gemm", g, exec);
}

bool grouped_gemm_decoded_fits(const GroupedGemmArgs& args) {
  if (!suits(row(args.a.format), row(args.b.format))) return false;
  // One product instruction takes 16 k.
  if (args.kind == GroupKind::depth && args.align % 16 != 0) return false;
  return counts(args);
}

Status grouped_gemm_decoded(const GroupedGemmArgs& args, const Execution& exec) {
  return multiply("grouped_gemm", args, exec);
}

}  // namespace diptych::cuda
