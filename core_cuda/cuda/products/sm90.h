// The arguments of the kernels on Hopper's tensor cores, and their launches (native_*.cu).
#pragma once

#include <cuda.h>

#include "cuda/gemm/operand.h"
#include "cuda/kernels.h"
#include "diptych/grouped.h"

namespace diptych::cuda {

// When partial sums are promoted from the tensor cores to float32 sums, and by which scales they are multiplied.
enum class Promotion : int {
  none,     // per-tensor with fast_accum, and bfloat16: all of k in the tensor cores
  plain,    // per-tensor: every 128 k
  columns,  // every 128 k: a scale for each row of A, one for each 128 rows of B
  full,     // every 128 k: a scale for each row of A and of B
};

constexpr int kNativeTileK = 128;      // bytes; all k below is counted in bytes
constexpr int kNativeCluster = 2;      // thread blocks that share a tile of A or of B
constexpr int kNativeMaxGroups = 512;  // their boundaries lie in shared memory

// The tile of D that a thread block computes at a time. Each multiplying warpgroup computes 64 of its rows.
struct TileShape {
  int m, n;

  // The two thread blocks of a cluster share the longer operand: A of tiles side by side, or B of tiles one below the
  // other.
  constexpr bool beside() const { return m > n; }
};
// tall: three warpgroups multiply, so that two can add partial sums while the third one's products run. Else two
// multiply, and a tile has as many columns as registers can hold sums, and partial sums where there are some.
constexpr TileShape tile_shape(Promotion promotion, bool tall) {
  if (tall) return {192, 128};
  return {128, promotion == Promotion::none ? 256 : 192};
}

// An operand of MXFP8 or NVFP4, or a stack of them, and where its decoded form goes.
struct DecodedOperand {
  Operand each;     // the stack's first tensor
  int first, rows;  // the outer indices that are decoded: the first, a multiple of kDecodedOuter; how many
  uint16_t* to;     // bfloat16 [rows, pitch] for each tensor, moved back by `first` rows
  int64_t data_step, scale_step;  // bytes from one tensor of the stack to the next
  int pitch;                      // k, rounded up to whole 16 bytes; the elements past k are zeros
  int panels;                     // panels of kDecodedOuter outer indices in `rows`
};
constexpr int kDecodedOuter = 128, kDecodedK = 128;  // extents of a unit: elements that are decoded together

struct NativeArgs {
  CUtensorMap a, b;  // bytes: A [outer, k] or [outer, R]; B [G, N, k] or [1, N, R]; boxes of half a tile
  // FP8 only: [1, R, N] or [G, M, N]; boxes of 128 bytes x 64 rows; c_map: float32 only
  CUtensorMap d_map, c_map;
  const int32_t* offsets;  // null: one group of all rows
  int groups, rows;        // G, R
  int before;              // groups that come before these G in `offsets`
  bool last;               // no group comes after these
  bool depth;              // GroupKind
  int element_bytes;       // bytes of an element of A and B
  int m, n, k;             // depth: M, N and 0; rows: 0, N and bytes of K
  int d_rows, d_pitch;     // M and N, also where only a part of D is computed; steps of D, C and the bias
  int columns;             // tiles along N
  const float* a_scale;    // [outer >> a_shift, scale_k], or one, or null
  const float* b_scale;    // [G, outer >> b_shift, scale_k], or [G], or null
  int a_shift, b_shift;    // log2 of a block's rows
  int scale_k;             // blocks along k
  bool whole_scales;       // each four neighbours are 16-byte aligned
  int64_t b_scale_stack;   // elements from one weight's scales to the next
  void* d;
  const void* c;     // null where beta is 0
  const void* bias;  // [G, N], or null
  DType d_type, bias_type;
  float alpha, beta;
  bool pieces;  // stores D by single elements, because its rows are not aligned or alpha varies in a tile
  // bfloat16 only: amaxes of two-level operands (null for other formats), and the steps between those of neighbouring
  // outer indices and groups
  const float *a_amax, *b_amax;
  int64_t a_amax_step, b_amax_step, b_amax_stack;
  DecodedOperand decoded[2];  // bfloat16 only: A and B
  int units_k;                // bfloat16 only: units along k
  int units_ahead;            // bfloat16 only: units that each multiplying warpgroup decodes before it multiplies
  // bfloat16 only, zeros at the start: the number of units that were taken, the number that are ready, and a flag for
  // each unit that is ready: [panels of A, units_k], then [stack of B, panels, units_k]
  uint32_t* units;
};

// The sizes of a product, K in elements.
struct NativeShape {
  int64_t groups, rows, m, n, k;  // rows: m is R; depth: k is R
};
GroupedGemmArgs one_group(const GemmArgs&);
NativeShape native_shape(const GroupedGemmArgs&);  // no offsets: one group of all rows

// Returns whether the kernel's integers can count the groups, bytes and tiles, and the driver can make tensor maps.
bool native_counts(const GroupedGemmArgs&, const NativeShape&, int element_bytes, TileShape);

struct NativeOperands {
  const void *a, *b;  // in the layouts of NativeArgs::a and b
  int64_t pitch;      // bytes from one row to the next, a multiple of 16
  int element_bytes;
};

// Sets the number of thread blocks and all arguments but scales and amaxes. `pieces` must be set before. The shape is
// that of the part of D that begins at args.d.
Status make_native_args(const GroupedGemmArgs&, const NativeShape&, const NativeOperands&, TileShape, int device,
                        NativeArgs*, int64_t* blocks);

// Runs the kernel on FP8 operands. `tall`: see TileShape; only where partial sums are promoted.
Status multiply_native(const GroupedGemmArgs&, bool tall, const Execution&);

struct NativeLaunch {
  Promotion promotion;
  bool tall;  // TileShape
  bool a_e5m2, b_e5m2;
  bool many;  // bfloat16 only: many warps decode
  int64_t blocks;
};

Status launch_native_tensor(const NativeArgs&, const NativeLaunch&, const Execution&);
Status launch_native_block(const NativeArgs&, const NativeLaunch&, const Execution&);
Status launch_native_bf16(const NativeArgs&, const NativeLaunch&, const Execution&);

}  // namespace diptych::cuda
