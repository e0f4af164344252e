// The ops. Each takes plain arguments, checks them before anything runs, and fills outputs that the caller allocated.
// No op allocates device memory, synchronizes, or keeps state between calls.
#pragma once

#include "diptych/format.h"
#include "diptych/fused.h"
#include "diptych/moe.h"
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

struct AmaxArgs {             // max over non-NaN |x|, 0 where there is none
  TensorView x;               // [..., K] float32 | bfloat16 | float16
  TensorView out;             // [1] float32, or [M] with kRowAmax
  TensorView columnwise_out;  // [1] float32, optional: of the Hadamard-rotated tensor with kRht, else of x
  int32_t flags = 0;          // kRowAmax, kRht and kRhtSigns
  Source source;              // of what this computes from x
};

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

// Amaxes [n, R] by their number, which alone grows: number i lies in column i % R. `log_amax` writes them, and who
// reads them keeps the number that it has `taken`, so that one side writes and the other reads. Numbers are not
// negative, and none is taken that is not written: else the op fails, on CUDA by a trap, and touches nothing outside of
// the log.
struct AmaxLog {
  TensorView amaxes;   // [n, R] float32
  TensorView written;  // [1] int64

  bool given() const { return amaxes.given(); }
};

struct LogAmaxArgs {
  TensorView amax;  // [n] float32
  AmaxLog log;      // gets it as its next
};

// Delayed scaling's update of n tensors that share an element (NUMERICS 2). Outputs may be the inputs themselves.
// Where `seen` equals `step` the outputs are the inputs, unchanged. CUDA compares them inside the kernel, so that a
// captured graph updates once in a step however often it runs. Several calls may share `seen`: the caller writes it.
struct ScaleUpdateArgs {
  TensorView history;      // [n, L] float32
  TensorView scale;        // [n] float32
  TensorView reduced;      // [n] float32, optional: amaxes after reduction over a group
  TensorView amax;         // [n] float32, optional: chosen by a caller's own algorithm, where last != 0
  TensorView new_history;  // [n, L] float32
  TensorView new_scale;    // [n] float32
  TensorView seen;         // [1] int64, optional: the step of the last update
  TensorView step;         // [1] int64, with seen: this step
  // Amaxes that belong into history[., 0], which gets them also where `seen` equals `step`. History is updated in
  // place.
  TensorView pending;    // [n] float32, optional: zeroed
  AmaxLog log;           // optional: from number `taken` on. More than R of them is an error, on CUDA a trap
  TensorView taken;      // [n] int64, with log
  TensorView scale_out;  // [n] float32, optional: gets what new_scale does
  float fp8_max = 448.0f;
  int32_t margin = 0;
  bool most_recent = false;  // else the maximum of the history
};

struct DequantizeArgs {
  QuantizedView q;
  TensorView out;  // [M, K] in the tensor's own orientation, also from a transposed copy
};

// D = alpha * op(A) @ op(B) + bias + beta * C, float32 accumulation, D [M, N].
// An operand reduces over its columns in the rowwise copy and over its rows in the columnwise copy. Amaxes of two-level
// operands enter alpha: ((alpha * amax_a) * amax_b) * float32(1 / (36 * 448 * 448)); of one alone: (alpha * amax) *
// float32(1 / 2688).
struct GemmArgs {
  QuantizedView a;       // rowwise: [M, K]; columnwise: of a [K, M] tensor
  QuantizedView b;       // rowwise: [N, K]; columnwise: of a [K, N] tensor
  TensorView d;          // [M, N] float32 | bfloat16 | float16
  TensorView c;          // [M, N] of d's dtype, may be d itself; absent: beta must be 0
  TensorView bias;       // [N] float32 | bfloat16 | float16, optional
  TensorView workspace;  // uint8, at least gemm_workspace_bytes, 16-byte aligned; CUDA only
  float alpha = 1.0f;
  float beta = 0.0f;
  bool fast_accum = false;  // Hopper's reduced-precision accumulation; per-tensor formats only
};

struct BiasGradArgs {    // out[n] = sum over rows of dy[., n] in float32, in an order fixed by the shape
  TensorView dy;         // [..., N] float32 | bfloat16 | float16
  TensorView out;        // [N] float32 | bfloat16 | float16
  TensorView workspace;  // uint8, at least bias_grad_workspace_bytes, 16-byte aligned; CUDA only
};

Status amax(const AmaxArgs&, const Execution&);
Status quantize(const QuantizeArgs&, const Execution&);
Status log_amax(const LogAmaxArgs&, const Execution&);
Status scale_update(const ScaleUpdateArgs&, const Execution&);
Status dequantize(const DequantizeArgs&, const Execution&);
Status gemm(const GemmArgs&, const Execution&);
Status bias_grad(const BiasGradArgs&, const Execution&);

// CUDA workspace sizes. Functions of the shape alone, so that a tracer can ask.
// `epilogue`: a bias is given or beta is not 0, so that the product may have to be held in float32.
int64_t gemm_workspace_bytes(int64_t m, int64_t n, int64_t k, bool epilogue);
int64_t bias_grad_workspace_bytes(int64_t m, int64_t n);

}  // namespace diptych
