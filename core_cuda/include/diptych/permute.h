// Rows between token order and expert order (NUMERICS 8). No op waits for a count: token counts stay on the device, and
// outputs have sizes that the caller chose. Maps come from other people's routers: whatever stands in them, nothing is
// read or written out of bounds.
#pragma once

#include "diptych/status.h"
#include "diptych/tensor.h"

namespace diptych {

inline constexpr int64_t kMaxSlots = 2048;  // experts of a map, destinations of a token, chunks to sort
inline constexpr int kMaxPlanes = 4;        // tensors that one call of permute moves

// What a routing tensor holds, numbered as the frontends pass it.
enum class RoutingMap : int32_t {
  mask,   // [T, E] uint8: a token goes to each expert whose entry is not 0; slots = E
  index,  // [T, k] int32 | int64: a token goes to each expert named; ids outside of 0..E-1 name none; slots = k
  count_
};

// Rows go to experts in ascending order, inside an expert in token order (index: in order of t * k + slot, so that an
// id that a token names twice gives two rows). Each expert's region starts at a multiple of `align`. Rows past the end
// of `row_source` are dropped.
struct PermuteMapArgs {
  TensorView routing;
  RoutingMap kind = RoutingMap::mask;
  int32_t align = 1;
  TensorView row_id_map;         // [T, slots] int32: the slot's row, or -1
  TensorView tokens_per_expert;  // [E] int32: rows that exist
  TensorView expert_offsets;     // [E + 1] int32: where each region starts, and where the last one ends
  TensorView row_source;         // [rows] int32: t * slots + slot of each row, -1 where there is none
  TensorView workspace;          // uint8, at least permute_map_workspace_bytes, 16-byte aligned; CUDA only
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(PermuteMapArgs& a, F&& f) {
  f(a.routing), f(a.row_id_map, Role::output), f(a.tokens_per_expert, Role::output), f(a.expert_offsets, Role::output),
      f(a.row_source, Role::output), f(a.workspace, Role::workspace);
}

// Whole chunks of consecutive rows in another order: chunk order[j] comes j-th. Sizes below 0 are 0, and what they hold
// past T is cut. `order` names a chunk by its first mention; ids outside of 0..C-1 name none. Rows of no named chunk
// have no destination.
struct ChunkMapArgs {
  TensorView split_sizes;  // [C] int32
  TensorView order;        // [C] int32
  TensorView row_id_map;   // [T, 1] int32: as above
  TensorView row_source;   // [T] int32
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(ChunkMapArgs& a, F&& f) {
  f(a.split_sizes), f(a.order), f(a.row_id_map, Role::output), f(a.row_source, Role::output);
}

// What any map says of its destination. Entries outside of 0..rows-1 say nothing; of several that name a row the last
// one, with the largest t * slots + slot, counts.
struct InvertMapArgs {
  TensorView row_id_map;  // [T, slots] int32
  TensorView row_source;  // [rows] int32: t * slots + slot, -1 where no entry names the row
  TensorView kept;        // [T, slots] int32, optional: row_id_map, -1 for the entries that do not count
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(InvertMapArgs& a, F&& f) {
  f(a.row_id_map), f(a.row_source, Role::output), f(a.kept, Role::output);
}

// One tensor of rows, moved as bytes. Absent rows hold `fill`, four bytes that repeat along the row.
struct Plane {
  TensorView in;   // [..., K] with T rows, or [T]
  TensorView out;  // [rows, K] or [rows], of the same dtype
  uint32_t fill = 0;
};

// Rows of a plane's tensor, and the bytes of one.
inline int64_t plane_rows(const TensorView& t) { return t.rank == 1 ? t.numel() : t.rows(); }
inline int64_t plane_row_bytes(const TensorView& t) { return (t.rank == 1 ? 1 : t.cols()) * bytes(t.dtype); }

// out[row_id_map[t, s]] = in[t]; rows that `row_source` calls absent are filled. `row_source` must be the map's
// inverse, as the three ops above make it. Where row_id_map[row_source[r]] is not r, row r is filled on the CPU and
// undefined on CUDA.
struct PermuteArgs {
  Plane planes[kMaxPlanes];
  int32_t plane_count = 0;
  TensorView row_id_map;              // [T, slots] int32
  TensorView row_source;              // [rows] int32
  TensorView probs;                   // [T, slots] float32 | bfloat16 | float16 | float64, optional
  TensorView permuted_probs;          // [rows] of probs' dtype, with probs: each row's own, absent rows' 0
  bool zero_prob_is_padding = false;  // with probs: a probability of exactly 0 makes its row an absent one
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(PermuteArgs& a, F&& f) {
  for (Plane& p : a.planes) f(p.in), f(p.out, Role::output);
  f(a.row_id_map), f(a.row_source), f(a.probs), f(a.permuted_probs, Role::output);
}

// out[h, r] = in[h, token of row_source[r]], absent rows 0: the columnwise copy of a tensor whose payload is
// transposed.
struct PermuteColumnsArgs {
  TensorView in;          // [H, T], one byte an element
  TensorView out;         // [H, rows] of the same dtype
  TensorView row_source;  // [rows] int32
  int64_t slots = 1;      // of the map that row_source belongs to
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(PermuteColumnsArgs& a, F&& f) {
  f(a.in), f(a.out, Role::output), f(a.row_source);
}

// y[t] = sum over the token's rows in ascending order of p * x[row], in float32, each operation rounded, from +0; one
// cast. Without probs p is 1. float64 (CPU) sums in float64.
struct UnpermuteArgs {
  TensorView x;                // [rows, H] float32 | bfloat16 | float16, on the CPU also float64
  TensorView row_id_map;       // [T, slots] int32
  TensorView probs;            // [T, slots] float32 | bfloat16 | float16, beside float64 rows also float64; optional
  TensorView y;                // [T, H] of x's dtype
  TensorView permuted_dprobs;  // [rows] float32 | bfloat16 | float16 | float64, optional: permute's other gradient
  TensorView dprobs;           // [T, slots] of its dtype, with it: gathered; 0 where there is no row
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(UnpermuteArgs& a, F&& f) {
  f(a.x), f(a.row_id_map), f(a.probs), f(a.y, Role::output), f(a.permuted_dprobs), f(a.dprobs, Role::output);
}

// dx[row] = p * dy[t], absent rows 0; dprobs[t, s] = dot(x[row], dy[t]) in float32, in an order that the shape fixes, 0
// where there is no row. Without probs, unpermute's gradient is permute.
struct UnpermuteGradArgs {
  TensorView dy;          // [T, H] float32 | bfloat16 | float16, on the CPU also float64
  TensorView row_id_map;  // [T, slots] int32
  TensorView row_source;  // [rows] int32
  TensorView probs;       // [T, slots], as above
  TensorView dx;          // [rows, H] of dy's dtype
  TensorView x;           // [rows, H] of dy's dtype, with dprobs
  TensorView dprobs;      // [T, slots] of probs' dtype, optional
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(UnpermuteGradArgs& a, F&& f) {
  f(a.dy), f(a.row_id_map), f(a.row_source), f(a.probs), f(a.dx, Role::output), f(a.x), f(a.dprobs, Role::output);
}

Status permute_map(const PermuteMapArgs&, const Execution&);
Status chunk_map(const ChunkMapArgs&, const Execution&);
Status invert_map(const InvertMapArgs&, const Execution&);
Status permute(const PermuteArgs&, const Execution&);
Status permute_columns(const PermuteColumnsArgs&, const Execution&);
Status unpermute(const UnpermuteArgs&, const Execution&);
Status unpermute_grad(const UnpermuteGradArgs&, const Execution&);

// CUDA workspace size, a function of kind and shape alone. `items`: T of a mask, T * k of an index map.
int64_t permute_map_workspace_bytes(RoutingMap kind, int64_t items, int64_t experts);

}  // namespace diptych
