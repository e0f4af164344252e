// Ops that move rows between token order and expert order (NUMERICS 8). No op synchronizes: token counts stay on the
// device, and the caller chooses the sizes of outputs. Maps may come from any router: whatever they contain, nothing is
// read or written out of bounds.
#pragma once

#include "diptych/op.h"

namespace diptych {

inline constexpr int64_t kMaxSlots = 2048;  // limit of a map's experts, of a token's slots and of chunks
inline constexpr int kMaxPlanes = 4;        // most tensors that one call of permute moves

// What a routing tensor contains, numbered as the frontends pass it.
enum class RoutingMap : int32_t {
  mask,   // [T, E] uint8: a token goes to each expert whose entry is not 0; slots = E
  index,  // [T, k] int32 | int64: a token goes to each expert whose id it lists; ids outside of 0..E-1 are ignored;
          // slots = k
  count_
};

// Makes the map of tokens to experts. Rows are ordered by expert, within an expert by token (index: by t * k + slot, so
// that an id that a token lists twice gives two rows). Each expert's region starts at a multiple of `align`. Rows past
// the end of `row_source` are dropped.
struct PermuteMapArgs {
  TensorView routing;
  RoutingMap kind = RoutingMap::mask;
  int32_t align = 1;
  TensorView row_id_map;         // [T, slots] int32: the slot's row, or -1
  TensorView tokens_per_expert;  // [E] int32: rows of each expert, without padding
  TensorView expert_offsets;     // [E + 1] int32: where each region starts, and where the last one ends
  TensorView row_source;         // [rows] int32: t * slots + slot of each row, -1 for absent rows
  TensorView workspace;          // uint8, at least permute_map_workspace_bytes, 16-byte aligned; CUDA only
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(PermuteMapArgs& a, F&& f) {
  f(a.routing), f(a.row_id_map, Role::output), f(a.tokens_per_expert, Role::output), f(a.expert_offsets, Role::output),
      f(a.row_source, Role::output), f(a.workspace, Role::workspace);
}

// Makes the map that reorders whole chunks of consecutive rows: chunk order[j] comes j-th. Sizes below 0 count as 0,
// and rows past T are cut off. If `order` lists a chunk twice, the first place counts; ids outside of 0..C-1 are
// ignored. Rows of unlisted chunks have no destination.
struct ChunkMapArgs {
  TensorView split_sizes;  // [C] int32
  TensorView order;        // [C] int32
  TensorView row_id_map;   // [T, 1] int32: the destination of each row, or -1
  TensorView row_source;   // [T] int32: the row that each destination row comes from, or -1
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(ChunkMapArgs& a, F&& f) {
  f(a.split_sizes), f(a.order), f(a.row_id_map, Role::output), f(a.row_source, Role::output);
}

// Computes `row_source` from any row_id_map. Entries outside of 0..rows-1 are ignored; if several entries hold the same
// row, the one with the largest t * slots + slot counts.
struct InvertMapArgs {
  TensorView row_id_map;  // [T, slots] int32
  TensorView row_source;  // [rows] int32: t * slots + slot, -1 where no entry holds the row
  TensorView kept;        // [T, slots] int32, optional: row_id_map with -1 for the entries that do not count
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(InvertMapArgs& a, F&& f) {
  f(a.row_id_map), f(a.row_source, Role::output), f(a.kept, Role::output);
}

// One tensor of rows, moved as bytes. Absent rows are filled with `fill`, four bytes that repeat along the row.
struct Plane {
  TensorView in;   // [..., K] with T rows, or [T]
  TensorView out;  // [rows, K] or [rows], of the same dtype
  uint32_t fill = 0;
};

// The number of rows of a plane's tensor, and the bytes of one row.
inline int64_t plane_rows(const TensorView& t) { return t.rank == 1 ? t.numel() : t.rows(); }
inline int64_t plane_row_bytes(const TensorView& t) { return (t.rank == 1 ? 1 : t.cols()) * bytes(t.dtype); }

// out[row_id_map[t, s]] = in[t]; rows whose `row_source` is -1 are filled. `row_source` must be the map's inverse, as
// the three ops above make it. Where row_id_map[row_source[r]] is not r, row r is filled on the CPU and undefined on
// CUDA.
struct PermuteArgs {
  Plane planes[kMaxPlanes];
  int32_t plane_count = 0;
  TensorView row_id_map;              // [T, slots] int32
  TensorView row_source;              // [rows] int32
  TensorView probs;                   // [T, slots] float32 | bfloat16 | float16 | float64, optional
  TensorView permuted_probs;          // [rows] of probs' dtype, with probs: each row's probability, 0 for absent rows
  bool zero_prob_is_padding = false;  // with probs: a probability of exactly 0 makes its row absent
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(PermuteArgs& a, F&& f) {
  for (Plane& p : a.planes) f(p.in), f(p.out, Role::output);
  f(a.row_id_map), f(a.row_source), f(a.probs), f(a.permuted_probs, Role::output);
}

// out[h, r] = in[h, token of row_source[r]], 0 for absent rows. Permutes a columnwise copy with transposed payload.
struct PermuteColumnsArgs {
  TensorView in;          // [H, T], one byte an element
  TensorView out;         // [H, rows] of the same dtype
  TensorView row_source;  // [rows] int32
  int64_t slots = 1;      // slots of the map that row_source belongs to
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(PermuteColumnsArgs& a, F&& f) {
  f(a.in), f(a.out, Role::output), f(a.row_source);
}

// y[t] = sum of p * x[row] over the token's rows in ascending order, starting from +0, in float32 with each operation
// rounded, then one cast. Without probs p is 1. float64 (CPU) is summed in float64.
struct UnpermuteArgs {
  TensorView x;                // [rows, H] float32 | bfloat16 | float16, on the CPU also float64
  TensorView row_id_map;       // [T, slots] int32
  TensorView probs;            // [T, slots] float32 | bfloat16 | float16, or float64 if x is float64; optional
  TensorView y;                // [T, H] of x's dtype
  TensorView permuted_dprobs;  // [rows] float32 | bfloat16 | float16 | float64, optional: gradient of permuted_probs
  TensorView dprobs;  // [T, slots] with permuted_dprobs and of its dtype: permuted_dprobs gathered, 0 without a row
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(UnpermuteArgs& a, F&& f) {
  f(a.x), f(a.row_id_map), f(a.probs), f(a.y, Role::output), f(a.permuted_dprobs), f(a.dprobs, Role::output);
}

// dx[row] = p * dy[t], 0 for absent rows; dprobs[t, s] = dot(x[row], dy[t]) in float32, in an order that the shape
// fixes, 0 for slots without a row. (Without probs, the gradient of unpermute is permute.)
struct UnpermuteGradArgs {
  TensorView dy;          // [T, H] float32 | bfloat16 | float16, on the CPU also float64
  TensorView row_id_map;  // [T, slots] int32
  TensorView row_source;  // [rows] int32
  TensorView probs;       // [T, slots], as in UnpermuteArgs
  TensorView dx;          // [rows, H] of dy's dtype
  TensorView x;           // [rows, H] of dy's dtype, with dprobs
  TensorView dprobs;      // [T, slots] of probs' dtype, optional
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(UnpermuteGradArgs& a, F&& f) {
  f(a.dy), f(a.row_id_map), f(a.row_source), f(a.probs), f(a.dx, Role::output), f(a.x), f(a.dprobs, Role::output);
}

DIPTYCH_OP(permute_map, PermuteMapArgs)
DIPTYCH_OP(chunk_map, ChunkMapArgs)
DIPTYCH_OP(invert_map, InvertMapArgs)
DIPTYCH_OP(permute, PermuteArgs)
DIPTYCH_OP(permute_columns, PermuteColumnsArgs)
DIPTYCH_OP(unpermute, UnpermuteArgs)
DIPTYCH_OP(unpermute_grad, UnpermuteGradArgs)

// CUDA workspace size, a function of kind and shape alone. `items`: T of a mask, T * k of an index map.
int64_t permute_map_workspace_bytes(RoutingMap kind, int64_t items, int64_t experts);

}  // namespace diptych
