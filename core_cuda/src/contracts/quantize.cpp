// Contracts of quantize, dequantize and amax, and of one copy of a quantized tensor.
#include <cmath>

#include "contracts/parts.h"

namespace diptych {

using namespace contract;

namespace {

constexpr int64_t kHadamard = 16;  // rows of one transform

bool transposed(const QuantizedView& q) {
  return q.columnwise && row(q.format).columnwise == ColumnwiseLayout::transposed;
}

// If the format has no ragged blocks, k is a multiple of the block, and m too where blocks run along it.
Status whole_blocks(const char* op, const FormatRow& f, int64_t m, int64_t k, bool along_m) {
  const int32_t unit = f.block_cols ? f.block_cols : f.pack();
  if (f.ragged() || (k % unit == 0 && (!along_m || m % unit == 0))) return {};
  return {Code::shape, std::string(op) + ": " + f.name + " needs a last dimension that is a multiple of " +
                           std::to_string(unit) +
                           (along_m ? ", and as many rows for a columnwise copy or square blocks" : "") + ", got " +
                           shape_text({m, k})};
}

Status known_flags(const char* op, int32_t flags, int32_t known) {
  if ((flags & kRhtSigns) && !(flags & kRht))
    return {Code::value, std::string(op) + ": random signs belong to the Hadamard transform, which was not asked for"};
  if ((flags & ~known) == 0) return {};
  return {Code::value, std::string(op) + ": flags " + std::to_string(flags) + " hold an unknown option"};
}

// The input suits the Hadamard transform: bfloat16, and rows in multiples of 16.
Status rotatable(const char* op, const TensorView& x, const Source& source) {
  DIPTYCH_TRY(ranked(op, "x", x));
  if (x.dtype != DType::bf16)
    return {Code::type, std::string(op) + ": the Hadamard transform takes bfloat16 alone, got " + describe(x)};
  const Extent e = encoded_extent(x, source);
  if (e.rows % kHadamard == 0) return {};
  return {Code::shape, std::string(op) + ": the Hadamard transform takes rows in multiples of " +
                           std::to_string(kHadamard) + ", got " + shape_text({e.rows, e.cols})};
}

// The data and scales of one copy of an [m, k] tensor have the dtypes and shapes of its format.
Status copy(const char* op, const char* arg, const QuantizedView& q, int64_t m, int64_t k, const Device& device) {
  const FormatRow& f = row(q.format);
  const std::string data_name = std::string(arg) + " data (" + f.name + ")";
  const std::string scale_name = std::string(arg) + " scale_inv (" + f.name + ")";
  DIPTYCH_TRY(present(op, data_name.c_str(), q.data, device));
  DIPTYCH_TRY(of_dtype(op, data_name.c_str(), q.data, f.data()));
  DIPTYCH_TRY(whole_blocks(op, f, m, k, q.columnwise));
  const bool flip = transposed(q);
  DIPTYCH_TRY(of_shape(op, data_name.c_str(), q.data, flip ? k : m, (flip ? m : k) / f.pack()));
  DIPTYCH_TRY(present(op, scale_name.c_str(), q.scale_inv, device));
  DIPTYCH_TRY(of_dtype(op, scale_name.c_str(), q.scale_inv, f.scale));
  const ScaleShape s = scale_shape(f, q.columnwise, m, k);
  if (f.one_scale()) return of_numel(op, scale_name.c_str(), q.scale_inv, 1);
  return of_shape(op, scale_name.c_str(), q.scale_inv, s.rows, s.cols);
}

}  // namespace

Status contract::known(const char* op, FormatId id) {
  if (valid(id)) return {};
  return {Code::value, std::string(op) + ": unknown format id " + std::to_string(static_cast<int32_t>(id))};
}

Status contract::lone_copy(const char* op, const char* arg, const QuantizedView& q, const Device& device) {
  DIPTYCH_TRY(known(op, q.format));
  const std::string data_name = std::string(arg) + " data (" + row(q.format).name + ")";
  DIPTYCH_TRY(present(op, data_name.c_str(), q.data, device));
  DIPTYCH_TRY(ranked(op, data_name.c_str(), q.data));
  const FormatRow& f = row(q.format);
  const int64_t rows = q.data.rows(), cols = q.data.cols() * f.pack();
  DIPTYCH_TRY(transposed(q) ? copy(op, arg, q, cols, rows, device) : copy(op, arg, q, rows, cols, device));
  const std::string amax_name = std::string(arg) + " amax (" + f.name + ")";
  if (f.rule != ScaleRule::two_level) {
    if (q.amax.given()) return {Code::value, std::string(op) + ": " + amax_name + " is not read by this format"};
    return {};
  }
  const bool each_row = !q.columnwise && q.amax.given() && q.amax.numel() == rows;
  return floats(op, amax_name.c_str(), q.amax, each_row ? rows : 1, device);
}

Extents extents(const QuantizedView& q) {
  const int64_t rows = q.data.rows(), cols = q.data.cols() * row(q.format).pack();
  return q.columnwise && !transposed(q) ? Extents{cols, rows} : Extents{rows, cols};
}

Status check(const AmaxArgs& a, const Device& device) {
  constexpr const char* op = "amax";
  DIPTYCH_TRY(present(op, "x", a.x, device));
  DIPTYCH_TRY(high_precision(op, "x", a.x));
  DIPTYCH_TRY(known_flags(op, a.flags, kRowAmax | kRht | kRhtSigns));
  if (a.flags & kRowAmax) DIPTYCH_TRY(ranked(op, "x", a.x));
  DIPTYCH_TRY(source(op, a.x, a.source, device, {&a.out, &a.columnwise_out}));
  DIPTYCH_TRY(floats(op, "out", a.out, a.flags & kRowAmax ? encoded_extent(a.x, a.source).rows : 1, device));
  DIPTYCH_TRY(apart(op, "out", a.out, "x", a.x));
  if (a.flags & kRht) {
    DIPTYCH_TRY(rotatable(op, a.x, a.source));
    DIPTYCH_TRY(present(op, "columnwise_out", a.columnwise_out, device));
  }
  if (!a.columnwise_out.given()) return {};
  DIPTYCH_TRY(floats(op, "columnwise_out", a.columnwise_out, 1, device));
  DIPTYCH_TRY(apart(op, "columnwise_out", a.columnwise_out, "x", a.x));
  return apart(op, "columnwise_out", a.columnwise_out, "out", a.out);
}

namespace {

// The format's rule supports the options, and none excludes another.
Status options(const QuantizeArgs& a) {
  const FormatRow& f = row(a.spec.format);
  const std::string who = std::string("quantize (") + f.name + ")";
  const char* op = who.c_str();
  const auto refuse = [&](const std::string& why) { return Status(Code::value, who + ": " + why); };
  const bool two_level = f.rule == ScaleRule::two_level, divide = f.rule == ScaleRule::divide;
  const bool square = a.spec.has(kSquare), given = a.scale.given();
  DIPTYCH_TRY(known_flags(op, a.spec.flags, kPow2 | kSquare | kRowAmax | kRht | kRhtSigns | kStochastic | kFromRows));
  if (!(std::isfinite(a.spec.eps) && a.spec.eps >= 0.0f))
    return refuse("eps must be finite and >= 0, got " + std::to_string(a.spec.eps));
  if (!divide && (a.spec.has(kPow2) || a.spec.eps != 0.0f))
    return refuse("the format has a scale rule of its own; pow2 and eps do not apply");
  if (divide && square) return refuse("the format has no square variant; a format of its own has 2-D blocks");
  if (square && (f.block_rows == 0 || f.block_cols == 0))
    return refuse("the format has no square variant: its block is a whole row or a whole column");
  if (!two_level && (a.spec.flags & (kRowAmax | kRht | kRhtSigns | kStochastic)))
    return refuse("the format has no amax per row, Hadamard transform or stochastic rounding");
  if (square && (a.spec.flags & (kRowAmax | kRht | kStochastic)))
    return refuse(
        "square blocks make both copies alike; an amax per row, a Hadamard transform or stochastic rounding "
        "would make them differ");
  if (a.spec.has(kRowAmax) && !a.rowwise.given())
    return refuse("an amax per row is for the rowwise copy, which was not asked for");
  if (a.spec.has(kRht)) {
    if (!a.columnwise.given())
      return refuse("the Hadamard transform is for the columnwise copy, which was not asked for");
    DIPTYCH_TRY(rotatable(op, a.x, a.source));
  }
  if (a.spec.has(kFromRows)) {
    if (copy_format(a.spec, true) == a.spec.format || f.block_rows != 1)
      return refuse("only formats with one row in a block have columnwise copies made from rows, in square blocks");
    if (!a.spec.has(kPow2)) return refuse("columnwise copies are made from rows by powers of two; ask for pow2 too");
    if (!a.columnwise.given()) return refuse("copies made from rows are columnwise; no columnwise copy was asked for");
  }
  if (given && !f.one_scale()) return refuse("a scale is for per-tensor formats");
  if (given && (a.spec.has(kPow2) || a.spec.eps != 0.0f)) return refuse("scale was given; pow2 and eps do not apply");
  if (given && a.amax_mode == AmaxMode::given) return refuse("scale and amax were both given; the scale alone decides");
  if (!given && a.amax_mode == AmaxMode::accumulate) return refuse("an amax accumulates only if a scale is given");
  if (a.rng.given() && !a.spec.has(kStochastic))
    return refuse("rng is for stochastic rounding, which was not asked for");
  return {};
}

// amaxes, scale and rng: each is given exactly where the format and the options read or write it.
Status scaling(const QuantizeArgs& a, const Device& device) {
  constexpr const char* op = "quantize";
  const FormatRow& f = row(a.spec.format);
  const bool two_level = f.rule == ScaleRule::two_level;
  const std::string of = std::string(" (") + f.name + ")";
  const auto one = [&](const char* name, const TensorView& t, bool wanted, int64_t n) -> Status {
    if (wanted) return floats(op, (name + of).c_str(), t, n, device);
    if (!t.given()) return {};
    return {Code::value, std::string(op) + ": " + name + of + " is neither read nor written here; " +
                             (two_level ? "each copy that is wanted has one" : "amax is for per-tensor formats")};
  };
  DIPTYCH_TRY(one("amax", a.amax, f.one_scale() || (two_level && a.rowwise.given()),
                  a.spec.has(kRowAmax) ? encoded_extent(a.x, a.source).rows : 1));
  DIPTYCH_TRY(one("columnwise_amax", a.columnwise_amax, two_level && a.columnwise.given(), 1));
  if (!f.one_scale() && !two_level && a.amax_mode != AmaxMode::compute)
    return {Code::value,
            std::string(op) + ": amax is for per-tensor and two-level formats; " + f.name + " takes one per block"};
  if (a.scale.given()) DIPTYCH_TRY(floats(op, ("scale" + of).c_str(), a.scale, 1, device));
  if (!a.spec.has(kStochastic)) return {};
  const int64_t words = a.rng.given() && a.rng.numel() == 8 ? 8 : 4;  // of a part, or of a whole tensor
  return holds(op, ("rng" + of).c_str(), a.rng, DType::i32, words, device);
}

Status summing(const QuantizeArgs& a, int64_t m, int64_t k, const Device& device) {
  constexpr const char* op = "quantize";
  if (!a.column_sum.given()) {
    if (!a.workspace.given()) return {};
    return {Code::value, std::string(op) + ": workspace is for column_sum, which was not asked for"};
  }
  DIPTYCH_TRY(present(op, "column_sum", a.column_sum, device));
  DIPTYCH_TRY(high_precision(op, "column_sum", a.column_sum));
  DIPTYCH_TRY(of_numel(op, "column_sum", a.column_sum, k));
  return workspace(op, a.workspace, column_sum_workspace_bytes(m, k), device, operands(a));
}

}  // namespace

Status check(const QuantizeArgs& a, const Device& device) {
  constexpr const char* op = "quantize";
  DIPTYCH_TRY(known(op, a.spec.format));
  const FormatRow& f = row(a.spec.format);
  DIPTYCH_TRY(present(op, "x", a.x, device));
  DIPTYCH_TRY(high_precision(op, "x", a.x));
  DIPTYCH_TRY(ranked(op, "x", a.x));
  if (!a.rowwise.given() && !a.columnwise.given())
    return {Code::value, std::string(op) + ": neither a rowwise nor a columnwise copy was asked for"};
  for (const QuantizedView* q : {&a.rowwise, &a.columnwise})
    if (!q->given() && q->scale_inv.given())
      return {Code::argument, std::string(op) + ": " + (q->columnwise ? "columnwise" : "rowwise") + " scale_inv (" +
                                  f.name + ") was given without its data"};
  DIPTYCH_TRY(options(a));
  DIPTYCH_TRY(source(op, a.x, a.source, device,
                     {&a.rowwise.data, &a.rowwise.scale_inv, &a.columnwise.data, &a.columnwise.scale_inv, &a.amax,
                      &a.columnwise_amax, &a.column_sum}));
  const auto [m, k] = encoded_extent(a.x, a.source);
  DIPTYCH_TRY(whole_blocks(op, f, m, k, a.columnwise.given() || a.spec.has(kSquare)));
  for (const QuantizedView* q : {&a.rowwise, &a.columnwise})
    if (q->given() && q->format != copy_format(a.spec, q->columnwise))
      return {Code::value, std::string(op) + ": a copy of " + f.name + " cannot be " + row(q->format).name};
  for (const QuantizedView* q : {&a.rowwise, &a.columnwise})
    if (q->given()) DIPTYCH_TRY(copy(op, q->columnwise ? "columnwise" : "rowwise", *q, m, k, device));
  DIPTYCH_TRY(scaling(a, device));
  DIPTYCH_TRY(summing(a, m, k, device));

  struct Named {
    const char* name;
    const TensorView& t;
  };
  const Named ins[] = {{"x", a.x}, {"scale", a.scale}, {"rng", a.rng}};
  const Named amaxes[] = {{"amax", a.amax}, {"columnwise_amax", a.columnwise_amax}};
  const Named outs[] = {{"rowwise data", a.rowwise.data},
                        {"rowwise scale_inv", a.rowwise.scale_inv},
                        {"columnwise data", a.columnwise.data},
                        {"columnwise scale_inv", a.columnwise.scale_inv},
                        {"column_sum", a.column_sum}};
  for (const Named& out : outs) {
    for (const Named& in : ins) DIPTYCH_TRY(apart(op, out.name, out.t, in.name, in.t));
    for (const Named& in : amaxes) DIPTYCH_TRY(apart(op, out.name, out.t, in.name, in.t));
    for (const Named* other = outs; other != &out; ++other)
      DIPTYCH_TRY(apart(op, out.name, out.t, other->name, other->t));
  }
  for (const Named& out : amaxes)
    for (const Named& in : ins) DIPTYCH_TRY(apart(op, out.name, out.t, in.name, in.t));
  if (a.amax_mode == AmaxMode::given) return {};  // both are only read, so they may be one tensor
  return apart(op, "columnwise_amax", a.columnwise_amax, "amax", a.amax);
}

Status check(const DequantizeArgs& a, const Device& device) {
  constexpr const char* op = "dequantize";
  DIPTYCH_TRY(lone_copy(op, "q", a.q, device));
  const std::string out = std::string("out of ") + row(a.q.format).name;
  DIPTYCH_TRY(present(op, out.c_str(), a.out, device));
  DIPTYCH_TRY(high_precision(op, out.c_str(), a.out));
  const int64_t rows = a.q.data.rows(), cols = a.q.data.cols() * row(a.q.format).pack();
  DIPTYCH_TRY(of_shape(op, out.c_str(), a.out, transposed(a.q) ? cols : rows, transposed(a.q) ? rows : cols));
  DIPTYCH_TRY(apart(op, "out", a.out, "data", a.q.data));
  DIPTYCH_TRY(apart(op, "out", a.out, "amax", a.q.amax));
  return apart(op, "out", a.out, "scale_inv", a.q.scale_inv);
}

}  // namespace diptych
