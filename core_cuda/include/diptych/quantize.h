// Quantization of a tensor into the copies of a format, dequantization, and the amaxes that scales are computed from.
#pragma once

#include "diptych/format.h"
#include "diptych/op.h"
#include "diptych/source.h"

namespace diptych {

// One copy of a quantized [m, k] tensor. Rowwise data has the tensor's shape; columnwise data is [k, m] where the
// format's columnwise layout is `transposed`; a packed format's last extent is halved. Scales are logical row-major
// (see scale_shape; per-tensor: one element).
struct QuantizedView {
  FormatId format{};
  bool columnwise = false;
  TensorView data;
  TensorView scale_inv;
  TensorView amax;  // ScaleRule::two_level: [1] float32; the rowwise copy may have one per row instead

  bool given() const { return data.given(); }
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(QuantizedView& a, F&& f, Role role = Role::input) {
  f(a.data, role), f(a.scale_inv, role), f(a.amax, role);
}

// Options of quantize, numbered as the frontends pass them.
enum QuantFlag : int32_t {
  kPow2 = 1,         // ScaleRule::divide: floor the scale to a power of two
  kSquare = 2,       // block_cols x block_cols elements share one amax, which both copies use (E8M0, two_level)
  kRowAmax = 4,      // two_level: the rowwise copy has one amax per row instead of one per tensor
  kRht = 8,          // two_level: the columnwise copy encodes the Hadamard-rotated tensor; bfloat16 input only
  kRhtSigns = 16,    // with kRht: the transform uses random signs
  kStochastic = 32,  // two_level: stochastic rounding, from `rng`
  // ScaleRule::divide in blocks of one row, with kPow2: the columnwise copy is in square blocks, and a function of the
  // rowwise payload and scales alone (NUMERICS 3).
  kFromRows = 64
};

struct QuantSpec {
  FormatId format{};
  int32_t flags = 0;
  float eps = 0.0f;  // ScaleRule::divide: lower bound of amax

  constexpr bool has(QuantFlag f) const { return (flags & f) != 0; }
};

// The format of one copy: the spec's own, or with kFromRows, for the columnwise copy, the one with square blocks. The
// spec's own where the table has no such format.
constexpr FormatId copy_format(const QuantSpec& spec, bool columnwise) {
  if (!columnwise || !spec.has(kFromRows) || !valid(spec.format)) return spec.format;
  const FormatRow& f = row(spec.format);
  for (int32_t i = 0; i < kFormatCount; ++i) {
    const FormatRow& g = kFormats[i];
    if (g.element == f.element && g.scale == f.scale && g.rule == f.rule && g.columnwise == f.columnwise &&
        g.block_rows == f.block_cols && g.block_cols == f.block_cols)
      return static_cast<FormatId>(i);
  }
  return spec.format;
}

struct AmaxArgs {             // out = max over finite |x|, 0 if x has none
  TensorView x;               // [..., K] float32 | bfloat16 | float16
  TensorView out;             // [1] float32, or [M] with kRowAmax
  TensorView columnwise_out;  // [1] float32, optional: the Hadamard-rotated tensor's amax with kRht, else x's
  int32_t flags = 0;          // kRowAmax, kRht and kRhtSigns
  Source source;              // the amaxes are those of the encoded tensor
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(AmaxArgs& a, F&& f) {
  f(a.x), f(a.out, Role::output), f(a.columnwise_out, Role::output), fields(a.source, f);
}

enum class AmaxMode : int32_t {
  compute,     // computes it from x and writes it
  given,       // reads it
  accumulate,  // writes the larger of x's and the tensor's content; needs `scale`
};

struct QuantizeArgs {
  TensorView x;  // [..., K] float32 | bfloat16 | float16
  QuantSpec spec;
  AmaxMode amax_mode = AmaxMode::compute;
  TensorView amax;  // [1] float32: per-tensor formats, and two_level where the rowwise copy is wanted (kRowAmax: [M])
  TensorView columnwise_amax;  // [1] float32: two_level where the columnwise copy is wanted: amax of what it encodes
  TensorView scale;            // [1] float32, optional, per-tensor formats: the scale to use (delayed scaling)
  // [4] int32 with kStochastic: low and high word of the seed, of the offset; a call uses two offsets. [8] for a part
  // of a tensor, which then has the whole tensor's random bits: the part's row and column, and the whole tensor's
  // extents, multiples of 16 along blocks, follow. Both are those of what is encoded, for either copy.
  TensorView rng;
  QuantizedView rowwise;  // at least one of the two copies is given
  QuantizedView columnwise;
  Source source;          // encodes its result, unrounded; the Hadamard transform rounds that to bfloat16
  TensorView column_sum;  // [K] float32 | bfloat16 | float16, optional: sum over the encoded rows (kSumChunk)
  TensorView workspace;   // uint8, with column_sum: at least column_sum_workspace_bytes, 16-byte aligned; CUDA only
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(QuantizeArgs& a, F&& f) {
  const Role amax = a.amax_mode == AmaxMode::given ? Role::input : Role::output;
  f(a.x), f(a.amax, amax), f(a.columnwise_amax, amax), f(a.scale), f(a.rng), fields(a.source, f);
  fields(a.rowwise, f, Role::output), fields(a.columnwise, f, Role::output), f(a.column_sum, Role::output);
  f(a.workspace, Role::workspace);
}

struct DequantizeArgs {
  QuantizedView q;
  TensorView out;  // [M, K], never transposed, even if the copy is
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(DequantizeArgs& a, F&& f) {
  fields(a.q, f), f(a.out, Role::output);
}

DIPTYCH_OP(amax, AmaxArgs)
DIPTYCH_OP(quantize, QuantizeArgs)
DIPTYCH_OP(dequantize, DequantizeArgs)

}  // namespace diptych
