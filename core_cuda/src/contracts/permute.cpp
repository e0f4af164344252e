// Contracts of the ops that move rows between token order and expert order.
#include <limits>

#include "contracts/parts.h"

namespace diptych {

using namespace contract;

namespace {

constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();  // limit of everything that a map numbers

// Row ids and all numbers that they are computed from are int32.
Status counted(const char* op, const char* what, int64_t n) {
  if (n <= kMaxCount) return {};
  return {Code::shape, std::string(op) + ": " + what + " are " + std::to_string(n) +
                           ", and a map numbers at most 2147483647; permute fewer tokens at a time"};
}

Status few(const char* op, const char* what, int64_t n) {
  if (n <= kMaxSlots) return {};
  return {Code::unsupported, std::string(op) + ": " + std::to_string(n) + " " + what +
                                 ", and the kernels take at most " + std::to_string(kMaxSlots)};
}

Status matrix(const char* op, const char* arg, const TensorView& t, const Device& device) {
  DIPTYCH_TRY(present(op, arg, t, device));
  if (t.rank == 2) return {};
  return {Code::shape, std::string(op) + ": " + arg + " must have two dimensions, got " + describe(t)};
}

Status integers(const char* op, const char* arg, const TensorView& t, const Device& device) {
  DIPTYCH_TRY(present(op, arg, t, device));
  return of_dtype(op, arg, t, DType::i32);
}

bool is_float(DType d) { return is_high_precision(d) || d == DType::f64; }

Status float_type(const char* op, const char* arg, const TensorView& t, bool wide, const char* where) {
  if (is_high_precision(t.dtype) || (wide && t.dtype == DType::f64)) return {};
  return {Code::type,
          std::string(op) + ": " + arg + " must be float32, bfloat16 or float16" + where + ", got " + describe(t)};
}

// The operand of a sum: at least one dimension, and a floating-point dtype.
Status numbers(const char* op, const char* arg, const TensorView& t, const Device& device) {
  DIPTYCH_TRY(present(op, arg, t, device));
  DIPTYCH_TRY(ranked(op, arg, t));
  return float_type(op, arg, t, true, " (or, on the CPU, float64)");
}

// One number for each slot of the map. `wide`: float64 is allowed.
Status per_slot(const char* op, const char* arg, const TensorView& t, const TensorView& map, bool wide,
                const Device& device) {
  DIPTYCH_TRY(present(op, arg, t, device));
  DIPTYCH_TRY(float_type(op, arg, t, wide, wide ? " or float64" : " unless the rows are float64"));
  return of_shape(op, arg, t, map.rows(), map.cols());
}

}  // namespace

Status contract::row_map(const char* op, const TensorView& t, const Device& device) {
  DIPTYCH_TRY(matrix(op, "row_id_map", t, device));
  DIPTYCH_TRY(of_dtype(op, "row_id_map", t, DType::i32));
  DIPTYCH_TRY(few(op, "slots of a token", t.cols()));
  DIPTYCH_TRY(counted(op, "tokens", t.rows()));
  return counted(op, "tokens * slots", t.numel());
}

Status contract::row_source(const char* op, const TensorView& t, const Device& device) {
  DIPTYCH_TRY(integers(op, "row_source", t, device));
  return counted(op, "rows", t.numel());
}

Status check(const PermuteMapArgs& a, const Device& device) {
  constexpr const char* op = "permute_map";
  DIPTYCH_TRY(matrix(op, "routing", a.routing, device));
  if (a.kind < RoutingMap::mask || a.kind >= RoutingMap::count_)
    return {Code::value, std::string(op) + ": unknown kind of map " + std::to_string(static_cast<int32_t>(a.kind))};
  if (a.kind == RoutingMap::mask) {
    DIPTYCH_TRY(of_dtype(op, "routing (a mask)", a.routing, DType::u8));
  } else if (a.routing.dtype != DType::i32 && a.routing.dtype != DType::i64) {
    return {Code::type, std::string(op) + ": routing (expert ids) must be int32 or int64, got " + describe(a.routing)};
  }
  const int64_t tokens = a.routing.rows(), slots = a.routing.cols();
  DIPTYCH_TRY(row_map(op, a.row_id_map, device));
  DIPTYCH_TRY(of_shape(op, "row_id_map", a.row_id_map, tokens, slots));
  DIPTYCH_TRY(integers(op, "tokens_per_expert", a.tokens_per_expert, device));
  const int64_t experts = a.tokens_per_expert.numel();
  if (experts < 1)
    return {Code::shape, std::string(op) + ": tokens_per_expert is empty; there must be at least one expert"};
  DIPTYCH_TRY(few(op, "experts", experts));
  if (a.kind == RoutingMap::mask) DIPTYCH_TRY(of_numel(op, "tokens_per_expert", a.tokens_per_expert, slots));
  DIPTYCH_TRY(holds(op, "expert_offsets", a.expert_offsets, DType::i32, experts + 1, device));
  DIPTYCH_TRY(row_source(op, a.row_source, device));
  if (a.align < 1) return {Code::value, std::string(op) + ": align must be at least 1, got " + std::to_string(a.align)};
  DIPTYCH_TRY(counted(op, "rows with the alignment's padding", tokens * slots + experts * (int64_t{a.align} - 1)));
  const int64_t items = a.kind == RoutingMap::mask ? tokens : tokens * slots;
  DIPTYCH_TRY(workspace(op, a.workspace, permute_map_workspace_bytes(a.kind, items, experts), device, operands(a)));
  return all_apart(op, operands(a));
}

Status check(const ChunkMapArgs& a, const Device& device) {
  constexpr const char* op = "chunk_map";
  DIPTYCH_TRY(integers(op, "split_sizes", a.split_sizes, device));
  const int64_t chunks = a.split_sizes.numel();
  DIPTYCH_TRY(few(op, "chunks", chunks));
  DIPTYCH_TRY(holds(op, "order", a.order, DType::i32, chunks, device));
  DIPTYCH_TRY(row_map(op, a.row_id_map, device));
  if (a.row_id_map.cols() != 1)
    return {Code::shape, std::string(op) + ": row_id_map must be [T, 1], got " + describe(a.row_id_map)};
  DIPTYCH_TRY(holds(op, "row_source", a.row_source, DType::i32, a.row_id_map.rows(), device));
  return all_apart(op, operands(a));
}

Status check(const InvertMapArgs& a, const Device& device) {
  constexpr const char* op = "invert_map";
  DIPTYCH_TRY(row_map(op, a.row_id_map, device));
  DIPTYCH_TRY(row_source(op, a.row_source, device));
  if (a.kept.given()) {
    DIPTYCH_TRY(integers(op, "kept", a.kept, device));
    DIPTYCH_TRY(of_shape(op, "kept", a.kept, a.row_id_map.rows(), a.row_id_map.cols()));
  }
  return all_apart(op, operands(a));
}

Status check(const PermuteArgs& a, const Device& device) {
  constexpr const char* op = "permute";
  DIPTYCH_TRY(row_map(op, a.row_id_map, device));
  DIPTYCH_TRY(row_source(op, a.row_source, device));
  const int64_t tokens = a.row_id_map.rows(), rows = a.row_source.numel();
  if (a.plane_count < 1 || a.plane_count > kMaxPlanes)
    return {Code::value, std::string(op) + ": one call moves 1 to " + std::to_string(kMaxPlanes) + " tensors, got " +
                             std::to_string(a.plane_count)};
  for (int i = 0; i < a.plane_count; ++i) {
    const Plane& p = a.planes[i];
    const std::string at = std::to_string(i), in = std::string("input ") + at, out = std::string("output ") + at;
    DIPTYCH_TRY(present(op, in.c_str(), p.in, device));
    DIPTYCH_TRY(present(op, out.c_str(), p.out, device));
    DIPTYCH_TRY(ranked(op, in.c_str(), p.in));
    DIPTYCH_TRY(of_dtype(op, out.c_str(), p.out, p.in.dtype));
    if (plane_rows(p.in) != tokens)
      return {Code::shape, std::string(op) + ": " + in + " must have a row for each of the map's " +
                               std::to_string(tokens) + " tokens, got " + describe(p.in)};
    if ((p.in.rank == 1) != (p.out.rank == 1) || plane_rows(p.out) != rows ||
        plane_row_bytes(p.out) != plane_row_bytes(p.in))
      return {Code::shape, std::string(op) + ": " + out + " must have " + std::to_string(rows) +
                               " rows like those of " + describe(p.in) + ", got " + describe(p.out)};
    if (p.fill != 0 && plane_row_bytes(p.in) % 4 != 0)
      return {Code::value, std::string(op) + ": " + in + " is filled with four bytes that repeat, but a row of " +
                               describe(p.in) + " is not a multiple of four bytes"};
  }
  if (a.probs.given()) {
    DIPTYCH_TRY(per_slot(op, "probs", a.probs, a.row_id_map, true, device));
    DIPTYCH_TRY(holds(op, "permuted_probs", a.permuted_probs, a.probs.dtype, rows, device));
  } else {
    DIPTYCH_TRY(absent(op, "permuted_probs", a.permuted_probs, "there are no probs"));
    if (a.zero_prob_is_padding) return {Code::value, std::string(op) + ": zero_prob_is_padding without probs"};
  }
  return all_apart(op, operands(a));
}

Status check(const PermuteColumnsArgs& a, const Device& device) {
  constexpr const char* op = "permute_columns";
  DIPTYCH_TRY(matrix(op, "in", a.in, device));
  if (bytes(a.in.dtype) != 1)
    return {Code::type, std::string(op) + ": in must have elements of one byte, got " + describe(a.in)};
  DIPTYCH_TRY(row_source(op, a.row_source, device));
  DIPTYCH_TRY(counted(op, "tokens", a.in.cols()));
  DIPTYCH_TRY(present(op, "out", a.out, device));
  DIPTYCH_TRY(of_dtype(op, "out", a.out, a.in.dtype));
  DIPTYCH_TRY(of_shape(op, "out", a.out, a.in.rows(), a.row_source.numel()));
  if (a.slots < 1) return {Code::value, std::string(op) + ": slots must be at least 1, got " + std::to_string(a.slots)};
  DIPTYCH_TRY(few(op, "slots of a token", a.slots));
  return all_apart(op, operands(a));
}

Status check(const UnpermuteArgs& a, const Device& device) {
  constexpr const char* op = "unpermute";
  DIPTYCH_TRY(row_map(op, a.row_id_map, device));
  DIPTYCH_TRY(numbers(op, "x", a.x, device));
  DIPTYCH_TRY(counted(op, "rows", a.x.rows()));
  DIPTYCH_TRY(present(op, "y", a.y, device));
  DIPTYCH_TRY(of_dtype(op, "y", a.y, a.x.dtype));
  DIPTYCH_TRY(of_shape(op, "y", a.y, a.row_id_map.rows(), a.x.cols()));
  if (a.probs.given()) DIPTYCH_TRY(per_slot(op, "probs", a.probs, a.row_id_map, a.x.dtype == DType::f64, device));
  if (a.permuted_dprobs.given()) {
    DIPTYCH_TRY(present(op, "permuted_dprobs", a.permuted_dprobs, device));
    if (!is_float(a.permuted_dprobs.dtype))
      return {Code::type, std::string(op) + ": permuted_dprobs must be float32, bfloat16, float16 or float64, got " +
                              describe(a.permuted_dprobs)};
    DIPTYCH_TRY(of_numel(op, "permuted_dprobs", a.permuted_dprobs, a.x.rows()));
    DIPTYCH_TRY(present(op, "dprobs", a.dprobs, device));
    DIPTYCH_TRY(of_dtype(op, "dprobs", a.dprobs, a.permuted_dprobs.dtype));
    DIPTYCH_TRY(of_shape(op, "dprobs", a.dprobs, a.row_id_map.rows(), a.row_id_map.cols()));
  } else {
    DIPTYCH_TRY(absent(op, "dprobs", a.dprobs, "there are no permuted_dprobs"));
  }
  return all_apart(op, operands(a));
}

Status check(const UnpermuteGradArgs& a, const Device& device) {
  constexpr const char* op = "unpermute_grad";
  DIPTYCH_TRY(row_map(op, a.row_id_map, device));
  DIPTYCH_TRY(row_source(op, a.row_source, device));
  const int64_t rows = a.row_source.numel();
  DIPTYCH_TRY(numbers(op, "dy", a.dy, device));
  DIPTYCH_TRY(of_shape(op, "dy", a.dy, a.row_id_map.rows(), a.dy.cols()));
  const bool wide = a.dy.dtype == DType::f64;
  DIPTYCH_TRY(per_slot(op, "probs", a.probs, a.row_id_map, wide, device));
  DIPTYCH_TRY(present(op, "dx", a.dx, device));
  DIPTYCH_TRY(of_dtype(op, "dx", a.dx, a.dy.dtype));
  DIPTYCH_TRY(of_shape(op, "dx", a.dx, rows, a.dy.cols()));
  if (a.dprobs.given()) {
    DIPTYCH_TRY(per_slot(op, "dprobs", a.dprobs, a.row_id_map, wide, device));
    DIPTYCH_TRY(of_dtype(op, "dprobs", a.dprobs, a.probs.dtype));
    DIPTYCH_TRY(present(op, "x", a.x, device));
    DIPTYCH_TRY(of_dtype(op, "x", a.x, a.dy.dtype));
    DIPTYCH_TRY(of_shape(op, "x", a.x, rows, a.dy.cols()));
  } else {
    DIPTYCH_TRY(absent(op, "x", a.x, "dprobs was not asked for"));
  }
  return all_apart(op, operands(a));
}

}  // namespace diptych
