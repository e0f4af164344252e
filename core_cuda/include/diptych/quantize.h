// Quantization: of a tensor into the copies of a format, back, and the amaxes that scales are made of.
#pragma once

#include "diptych/format.h"
#include "diptych/source.h"
#include "diptych/status.h"
#include "diptych/tensor.h"

namespace diptych {

// One copy of a quantized [m, k] tensor. Rowwise data has the tensor's shape; columnwise data is [k, m] where the
// format's columnwise layout is `transposed`; a packed format's last extent is halved. Scales are logical row-major
// (see scale_shape; per-tensor: one element).
struct QuantizedView {
  FormatId format{};
  bool columnwise = false;
  TensorView data;
  TensorView scale_inv;
  TensorView amax;  // ScaleRule::two_level: [1] float32, or one per row of the tensor in the rowwise copy

  bool given() const { return data.given(); }
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(QuantizedView& a, F&& f, Role role = Role::input) {
  f(a.data, role), f(a.scale_inv, role), f(a.amax, role);
}

// Options of quantize, numbered as the frontends pass them.
enum QuantFlag : int32_t {
  kPow2 = 1,        // ScaleRule::divide: floor the scale to a power of two
  kSquare = 2,      // block_cols x block_cols elements share one amax, which both copies use (E8M0, two_level)
  kRowAmax = 4,     // two_level: the rowwise copy has one amax per row instead of one per tensor
  kRht = 8,         // two_level: the columnwise copy is of the Hadamard-rotated tensor; bfloat16 input only
  kRhtSigns = 16,   // with kRht: random signs
  kStochastic = 32  // two_level: stochastic rounding, from `rng`
};

struct QuantSpec {
  FormatId format{};
  int32_t flags = 0;
  float eps = 0.0f;  // ScaleRule::divide: lower bound of amax

  bool has(QuantFlag f) const { return (flags & f) != 0; }
};

struct AmaxArgs {             // max over finite |x|, 0 where there is none
  TensorView x;               // [..., K] float32 | bfloat16 | float16
  TensorView out;             // [1] float32, or [M] with kRowAmax
  TensorView columnwise_out;  // [1] float32, optional: of the Hadamard-rotated tensor with kRht, else of x
  int32_t flags = 0;          // kRowAmax, kRht and kRhtSigns
  Source source;              // of what this computes from x
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(AmaxArgs& a, F&& f) {
  f(a.x), f(a.out, Role::output), f(a.columnwise_out, Role::output), fields(a.source, f);
}

enum class AmaxMode : int32_t {
  compute,     // of x, written
  given,       // read
  accumulate,  // the larger of what is there and x's, written; needs `scale`
};

struct QuantizeArgs {
  TensorView x;  // [..., K] float32 | bfloat16 | float16
  QuantSpec spec;
  AmaxMode amax_mode = AmaxMode::compute;
  TensorView amax;  // [1] float32: per-tensor formats, and two_level where the rowwise copy is wanted (kRowAmax: [M])
  TensorView columnwise_amax;  // [1] float32: two_level where the columnwise copy is wanted, of what that copy encodes
  TensorView scale;            // [1] float32, optional, per-tensor formats: the scale to use (delayed scaling)
  TensorView rng;         // [4] int32 with kStochastic: low and high words of seed and offset; a call uses two offsets
  QuantizedView rowwise;  // either or both
  QuantizedView columnwise;
  Source source;          // encodes what this computes from x, unrounded; the Hadamard transform rounds it to bfloat16
  TensorView column_sum;  // [K] float32 | bfloat16 | float16, optional: sum over rows of what is encoded (kSumChunk)
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
  TensorView out;  // [M, K] in the tensor's own orientation, also from a transposed copy
};

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(DequantizeArgs& a, F&& f) {
  fields(a.q, f), f(a.out, Role::output);
}

Status amax(const AmaxArgs&, const Execution&);
Status quantize(const QuantizeArgs&, const Execution&);
Status dequantize(const DequantizeArgs&, const Execution&);

}  // namespace diptych
