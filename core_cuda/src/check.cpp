#include "check.h"

#include <cmath>
#include <cstdint>

#include "check_parts.h"

namespace diptych {
namespace {

constexpr int64_t kHadamard = 16;  // rows that one transform mixes

std::string shape_text(const int64_t* shape, int rank) {
  std::string out = "[";
  for (int i = 0; i < rank; ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

std::string shape_text(std::initializer_list<int64_t> shape) {
  return shape_text(shape.begin(), static_cast<int>(shape.size()));
}

std::string device_text(const Device& d) {
  return d.backend == Backend::cpu ? "cpu" : "cuda:" + std::to_string(d.index);
}

bool transposed(const QuantizedView& q) {
  return q.columnwise && row(q.format).columnwise == ColumnwiseLayout::transposed;
}

}  // namespace

namespace contract {

Status present(const char* op, const char* arg, const TensorView& t, const Device& device) {
  const std::string who = std::string(op) + ": " + arg;
  if (!t.given()) return {Code::type, who + " is missing"};
  if (t.device != device)
    return {Code::value, who + " is on " + device_text(t.device) + ", the other operands on " + device_text(device)};
  if (!t.contiguous) return {Code::value, who + " " + describe(t) + " is not contiguous; pass a contiguous copy"};
  if (t.numel() > 0 && t.data == nullptr) return {Code::value, who + " " + describe(t) + " has no memory"};
  if (reinterpret_cast<uintptr_t>(t.data) % bytes(t.dtype) != 0)
    return {Code::value, who + " " + describe(t) + " is not aligned to its element size"};
  return {};
}

Status high_precision(const char* op, const char* arg, const TensorView& t) {
  if (is_high_precision(t.dtype)) return {};
  return {Code::type, std::string(op) + ": " + arg + " must be float32, bfloat16 or float16, got " + describe(t)};
}

Status of_dtype(const char* op, const char* arg, const TensorView& t, DType dtype) {
  if (t.dtype == dtype) return {};
  return {Code::type, std::string(op) + ": " + arg + " must be " + name(dtype) + ", got " + describe(t)};
}

Status of_numel(const char* op, const char* arg, const TensorView& t, int64_t n) {
  if (t.numel() == n) return {};
  return {Code::value,
          std::string(op) + ": " + arg + " must hold " + std::to_string(n) + " elements, got " + describe(t)};
}

Status of_shape(const char* op, const char* arg, const TensorView& t, int64_t rows, int64_t cols) {
  if (t.rank >= 1 && t.rows() == rows && t.cols() == cols) return {};
  return {Code::value, std::string(op) + ": " + arg + " must be " + shape_text({rows, cols}) + ", got " + describe(t)};
}

Status ranked(const char* op, const char* arg, const TensorView& t) {
  if (t.rank >= 1) return {};
  return {Code::value, std::string(op) + ": " + arg + " must have at least one dimension, got a scalar"};
}

Status holds(const char* op, const char* arg, const TensorView& t, DType dtype, int64_t n, const Device& device) {
  DIPTYCH_TRY(present(op, arg, t, device));
  DIPTYCH_TRY(of_dtype(op, arg, t, dtype));
  return of_numel(op, arg, t, n);
}

Status floats(const char* op, const char* arg, const TensorView& t, int64_t n, const Device& device) {
  return holds(op, arg, t, DType::f32, n, device);
}

static bool overlap(const TensorView& a, const TensorView& b) {
  const auto* a0 = a.as<const char>();
  const auto* b0 = b.as<const char>();
  return a.numel() > 0 && b.numel() > 0 && a0 < b0 + b.numel() * bytes(b.dtype) && b0 < a0 + a.numel() * bytes(a.dtype);
}

Status apart(const char* op, const char* out_name, const TensorView& out, const char* in_name, const TensorView& in) {
  if (!in.given() || !out.given() || !overlap(out, in)) return {};
  return {Code::value, std::string(op) + ": " + out_name + " overlaps " + in_name + " in memory"};
}

Status workspace(const char* op, const TensorView& t, int64_t need, const Device& device,
                 std::initializer_list<const TensorView*> others) {
  if (device.backend == Backend::cpu || need == 0) return {};
  DIPTYCH_TRY(present(op, "workspace", t, device));
  DIPTYCH_TRY(of_dtype(op, "workspace", t, DType::u8));
  if (t.numel() < need || reinterpret_cast<uintptr_t>(t.data) % 16 != 0)
    return {Code::value, std::string(op) + ": workspace needs " + std::to_string(need) + " bytes, aligned to 16, got " +
                             describe(t)};
  for (const TensorView* other : others) DIPTYCH_TRY(apart(op, "workspace", t, "another operand", *other));
  return {};
}

}  // namespace contract

using namespace contract;

namespace {

Status known(const char* op, FormatId id) {
  if (valid(id)) return {};
  return {Code::value, std::string(op) + ": unknown format id " + std::to_string(static_cast<int32_t>(id))};
}

// Formats without ragged blocks: k, and m where a block runs along it, hold whole ones.
Status whole_blocks(const char* op, const FormatRow& f, int64_t m, int64_t k, bool along_m) {
  if (f.ragged() || (k % f.block_cols == 0 && (!along_m || m % f.block_cols == 0))) return {};
  return {Code::value, std::string(op) + ": " + f.name + " needs a last dimension that is a multiple of " +
                           std::to_string(f.block_cols) +
                           (along_m ? ", and as many rows for a columnwise copy or square blocks" : "") + ", got " +
                           shape_text({m, k})};
}

Status known_flags(const char* op, int32_t flags, int32_t known) {
  if ((flags & kRhtSigns) && !(flags & kRht))
    return {Code::value, std::string(op) + ": random signs belong to the Hadamard transform, which was not asked for"};
  if ((flags & ~known) == 0) return {};
  return {Code::value, std::string(op) + ": flags " + std::to_string(flags) + " hold an option that it does not know"};
}

// What the Hadamard transform of 16 consecutive rows asks of its input
Status rotatable(const char* op, const TensorView& x, const Source& source) {
  DIPTYCH_TRY(ranked(op, "x", x));
  if (x.dtype != DType::bf16)
    return {Code::type, std::string(op) + ": the Hadamard transform takes bfloat16 alone, got " + describe(x)};
  const Extent e = encoded_extent(x, source);
  if (e.rows % kHadamard == 0) return {};
  return {Code::value, std::string(op) + ": the Hadamard transform takes rows in multiples of " +
                           std::to_string(kHadamard) + ", got " + shape_text({e.rows, e.cols})};
}

// One copy of an [m, k] tensor against its format row.
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
  if (f.per_tensor()) return of_numel(op, scale_name.c_str(), q.scale_inv, 1);
  return of_shape(op, scale_name.c_str(), q.scale_inv, s.rows, s.cols);
}

}  // namespace

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

std::string describe(const TensorView& t) {
  return t.given() ? name(t.dtype) + shape_text(t.shape, t.rank) + " on " + device_text(t.device) : "nothing";
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

// Which options the format's rule knows, and which exclude each other.
Status options(const QuantizeArgs& a) {
  const FormatRow& f = row(a.spec.format);
  const std::string who = std::string("quantize (") + f.name + ")";
  const char* op = who.c_str();
  const auto refuse = [&](const std::string& why) { return Status(Code::value, who + ": " + why); };
  const bool two_level = f.rule == ScaleRule::two_level, divide = f.rule == ScaleRule::divide;
  const bool square = a.spec.has(kSquare), given = a.scale.given();
  DIPTYCH_TRY(known_flags(op, a.spec.flags, kPow2 | kSquare | kRowAmax | kRht | kRhtSigns | kStochastic));
  if (!(std::isfinite(a.spec.eps) && a.spec.eps >= 0.0f))
    return refuse("eps must be finite and >= 0, got " + std::to_string(a.spec.eps));
  if (!divide && (a.spec.has(kPow2) || a.spec.eps != 0.0f))
    return refuse("the format has a scale rule of its own; pow2 and eps do not apply");
  if (divide && square) return refuse("the format has no square variant; a format of its own has 2-D blocks");
  if (!two_level && (a.spec.flags & (kRowAmax | kRht | kRhtSigns | kStochastic)))
    return refuse("the format knows no amax per row, Hadamard transform or stochastic rounding");
  if (square && (a.spec.flags & (kRowAmax | kRht | kStochastic)))
    return refuse(
        "square blocks make both copies alike; an amax per row, a Hadamard transform or stochastic rounding "
        "would part them");
  if (a.spec.has(kRowAmax) && !a.rowwise.given())
    return refuse("an amax per row is for the rowwise copy, which was not asked for");
  if (a.spec.has(kRht)) {
    if (!a.columnwise.given())
      return refuse("the Hadamard transform is for the columnwise copy, which was not asked for");
    DIPTYCH_TRY(rotatable(op, a.x, a.source));
  }
  if (given && !f.per_tensor()) return refuse("a scale is for per-tensor formats");
  if (given && (a.spec.has(kPow2) || a.spec.eps != 0.0f)) return refuse("scale was given; pow2 and eps do not apply");
  if (given && a.amax_mode == AmaxMode::given) return refuse("scale and amax were both given; the scale alone decides");
  if (!given && a.amax_mode == AmaxMode::accumulate) return refuse("an amax accumulates beside a given scale only");
  if (a.rng.given() && !a.spec.has(kStochastic))
    return refuse("rng is for stochastic rounding, which was not asked for");
  return {};
}

// The small tensors beside x and its copies: each where the format and the options read or write it, and nowhere else.
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
  DIPTYCH_TRY(one("amax", a.amax, f.per_tensor() || (two_level && a.rowwise.given()),
                  a.spec.has(kRowAmax) ? encoded_extent(a.x, a.source).rows : 1));
  DIPTYCH_TRY(one("columnwise_amax", a.columnwise_amax, two_level && a.columnwise.given(), 1));
  if (!f.per_tensor() && !two_level && a.amax_mode != AmaxMode::compute)
    return {Code::value, std::string(op) + ": amax is for per-tensor formats; " + f.name + " takes one per block"};
  if (a.scale.given()) DIPTYCH_TRY(floats(op, ("scale" + of).c_str(), a.scale, 1, device));
  if (!a.spec.has(kStochastic)) return {};
  return holds(op, ("rng" + of).c_str(), a.rng, DType::i32, 4, device);
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
  return workspace(op, a.workspace, column_sum_workspace_bytes(m, k), device,
                   {&a.x, &a.amax, &a.columnwise_amax, &a.scale, &a.rng, &a.rowwise.data, &a.rowwise.scale_inv,
                    &a.columnwise.data, &a.columnwise.scale_inv, &a.column_sum, &a.source.gamma, &a.source.beta,
                    &a.source.mu, &a.source.rsigma, &a.source.dy, &a.source.row_id_map, &a.source.row_source});
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
      return {Code::type, std::string(op) + ": " + (q->columnwise ? "columnwise" : "rowwise") + " scale_inv (" +
                              f.name + ") was given without its data"};
  DIPTYCH_TRY(options(a));
  DIPTYCH_TRY(source(op, a.x, a.source, device,
                     {&a.rowwise.data, &a.rowwise.scale_inv, &a.columnwise.data, &a.columnwise.scale_inv, &a.amax,
                      &a.columnwise_amax, &a.column_sum}));
  const auto [m, k] = encoded_extent(a.x, a.source);
  DIPTYCH_TRY(whole_blocks(op, f, m, k, a.columnwise.given() || a.spec.has(kSquare)));
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
  if (a.amax_mode == AmaxMode::given) return {};  // both are read: one tensor may serve as both
  return apart(op, "columnwise_amax", a.columnwise_amax, "amax", a.amax);
}

static Status log(const char* op, const AmaxLog& log, int64_t n, const Device& device) {
  DIPTYCH_TRY(present(op, "log", log.amaxes, device));
  DIPTYCH_TRY(of_dtype(op, "log", log.amaxes, DType::f32));
  DIPTYCH_TRY(ranked(op, "log", log.amaxes));
  if (log.amaxes.cols() < 1) return {Code::value, std::string(op) + ": log " + describe(log.amaxes) + " has no column"};
  DIPTYCH_TRY(of_shape(op, "log", log.amaxes, n, log.amaxes.cols()));
  return holds(op, "written", log.written, DType::i64, 1, device);
}

Status check(const LogAmaxArgs& a, const Device& device) {
  constexpr const char* op = "log_amax";
  DIPTYCH_TRY(present(op, "amax", a.amax, device));
  DIPTYCH_TRY(of_dtype(op, "amax", a.amax, DType::f32));
  DIPTYCH_TRY(log(op, a.log, a.amax.numel(), device));
  return apart(op, "log", a.log.amaxes, "amax", a.amax);
}

Status check(const ScaleUpdateArgs& a, const Device& device) {
  constexpr const char* op = "scale_update";
  DIPTYCH_TRY(present(op, "history", a.history, device));
  DIPTYCH_TRY(of_dtype(op, "history", a.history, DType::f32));
  DIPTYCH_TRY(ranked(op, "history", a.history));
  const int64_t n = a.history.rows(), length = a.history.cols();
  if (length < 1) return {Code::value, std::string(op) + ": history " + describe(a.history) + " has no entry"};
  DIPTYCH_TRY(floats(op, "scale", a.scale, n, device));
  if (a.reduced.given()) DIPTYCH_TRY(floats(op, "reduced", a.reduced, n, device));
  if (a.amax.given()) DIPTYCH_TRY(floats(op, "amax", a.amax, n, device));
  DIPTYCH_TRY(floats(op, "new_history", a.new_history, n * length, device));
  DIPTYCH_TRY(of_shape(op, "new_history", a.new_history, n, length));
  DIPTYCH_TRY(floats(op, "new_scale", a.new_scale, n, device));
  if (a.seen.given() != a.step.given())
    return {Code::value, std::string(op) + ": seen and step come together, got seen " + describe(a.seen) +
                             " and step " + describe(a.step)};
  if (a.seen.given()) {
    DIPTYCH_TRY(holds(op, "seen", a.seen, DType::i64, 1, device));
    DIPTYCH_TRY(holds(op, "step", a.step, DType::i64, 1, device));
  }
  if (!(std::isfinite(a.fp8_max) && a.fp8_max > 0.0f))
    return {Code::value, std::string(op) + ": fp8_max must be finite and > 0, got " + std::to_string(a.fp8_max)};
  if (a.margin < -126 || a.margin > 126)  // 2^-margin is a normal float32
    return {Code::value, std::string(op) + ": margin must lie in -126..126, got " + std::to_string(a.margin)};
  if (a.most_recent && a.amax.given())
    return {Code::value, std::string(op) + ": amax was given; most_recent does not apply"};
  if ((a.pending.given() || a.log.given()) && a.new_history.data != a.history.data)
    return {Code::value, std::string(op) + ": pending and log go into a history that is updated in place"};
  if (a.pending.given()) DIPTYCH_TRY(floats(op, "pending", a.pending, n, device));
  if (a.log.given() != a.taken.given())
    return {Code::value, std::string(op) + ": log and taken come together, got log " + describe(a.log.amaxes) +
                             " and taken " + describe(a.taken)};
  if (a.log.given()) {
    DIPTYCH_TRY(log(op, a.log, n, device));
    DIPTYCH_TRY(holds(op, "taken", a.taken, DType::i64, n, device));
  }
  if (a.scale_out.given()) DIPTYCH_TRY(floats(op, "scale_out", a.scale_out, n, device));
  for (const TensorView* in : {&a.scale, &a.reduced, &a.amax, &a.seen, &a.step, &a.pending, &a.taken, &a.scale_out})
    DIPTYCH_TRY(apart(op, "new_history", a.new_history, "another operand", *in));
  for (const TensorView* in : {&a.history, &a.reduced, &a.amax, &a.seen, &a.step, &a.new_history})
    DIPTYCH_TRY(apart(op, "new_scale", a.new_scale, "another operand", *in));
  // In place is fine, partly in place is not.
  if (a.new_history.data != a.history.data) DIPTYCH_TRY(apart(op, "new_history", a.new_history, "history", a.history));
  if (a.new_scale.data != a.scale.data) return apart(op, "new_scale", a.new_scale, "scale", a.scale);
  return {};
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

Status contract::result(const char* op, const TensorView& d, const TensorView& c, int64_t rows, int64_t cols,
                        float alpha, float beta, const Device& device) {
  DIPTYCH_TRY(present(op, "d", d, device));
  DIPTYCH_TRY(high_precision(op, "d", d));
  DIPTYCH_TRY(of_shape(op, "d", d, rows, cols));
  const std::string who = std::string(op) + ": ";
  if (!std::isfinite(alpha) || !std::isfinite(beta)) return {Code::value, who + "alpha and beta must be finite"};
  if (beta != 0.0f && !c.given()) return {Code::value, who + "beta is not 0 and no c was given"};
  if (!c.given()) return {};
  DIPTYCH_TRY(present(op, "c", c, device));
  DIPTYCH_TRY(of_dtype(op, "c", c, d.dtype));
  DIPTYCH_TRY(of_shape(op, "c", c, rows, cols));
  return c.data == d.data ? Status() : apart(op, "d", d, "c", c);
}

Status contract::fast(const char* op, const QuantizedView& a, const QuantizedView& b) {
  if (row(a.format).per_tensor() && row(b.format).per_tensor()) return {};
  return {Code::value, std::string(op) + ": fast_accum exists for per-tensor FP8 only, got " + row(a.format).name +
                           " x " + row(b.format).name};
}

Status check(const GemmArgs& a, const Device& device) {
  constexpr const char* op = "gemm";
  DIPTYCH_TRY(lone_copy(op, "a", a.a, device));
  DIPTYCH_TRY(lone_copy(op, "b", a.b, device));
  const Extents ea = extents(a.a), eb = extents(a.b);
  const std::string pair = std::string(row(a.a.format).name) + " x " + row(a.b.format).name;
  if (ea.reduced != eb.reduced)
    return {Code::value, "gemm (" + pair + "): a reduces over " + std::to_string(ea.reduced) + " elements, b over " +
                             std::to_string(eb.reduced) + "; a is " + describe(a.a.data) + ", b " + describe(a.b.data)};
  DIPTYCH_TRY(result(op, a.d, a.c, ea.kept, eb.kept, a.alpha, a.beta, device));
  if (a.bias.given()) {
    DIPTYCH_TRY(present(op, "bias", a.bias, device));
    DIPTYCH_TRY(high_precision(op, "bias", a.bias));
    DIPTYCH_TRY(of_numel(op, "bias", a.bias, eb.kept));
  }
  if (a.fast_accum) DIPTYCH_TRY(fast(op, a.a, a.b));
  DIPTYCH_TRY(workspace(
      op, a.workspace, gemm_workspace_bytes(ea.kept, eb.kept, ea.reduced, a.bias.given() || a.beta != 0.0f), device,
      {&a.d, &a.c, &a.bias, &a.a.data, &a.a.scale_inv, &a.a.amax, &a.b.data, &a.b.scale_inv, &a.b.amax}));
  for (const TensorView* in : {&a.a.data, &a.a.scale_inv, &a.a.amax, &a.b.data, &a.b.scale_inv, &a.b.amax, &a.bias})
    DIPTYCH_TRY(apart(op, "d", a.d, "another operand", *in));
  return {};
}

Status check(const BiasGradArgs& a, const Device& device) {
  constexpr const char* op = "bias_grad";
  DIPTYCH_TRY(present(op, "dy", a.dy, device));
  DIPTYCH_TRY(high_precision(op, "dy", a.dy));
  DIPTYCH_TRY(ranked(op, "dy", a.dy));
  DIPTYCH_TRY(present(op, "out", a.out, device));
  DIPTYCH_TRY(high_precision(op, "out", a.out));
  DIPTYCH_TRY(of_numel(op, "out", a.out, a.dy.cols()));
  DIPTYCH_TRY(workspace(op, a.workspace, bias_grad_workspace_bytes(a.dy.rows(), a.dy.cols()), device, {&a.out, &a.dy}));
  return apart(op, "out", a.out, "dy", a.dy);
}

}  // namespace diptych
