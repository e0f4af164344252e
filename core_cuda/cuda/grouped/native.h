// The arguments of the native grouped kernel, and its launches (native_*.cu).
#pragma once

#include <cuda.h>

#include "cuda/kernels.h"
#include "diptych/grouped.h"

namespace diptych::cuda {

// When partial sums are promoted from the tensor cores to float32 sums, and by which scales they are multiplied.
enum class Promotion : int {
  none,     // per-tensor, fast_accum: all of k in the tensor cores
  plain,    // per-tensor: every 128 k
  columns,  // every 128 k: a scale for each row of A, one for each 128 rows of B
  full,     // every 128 k: a scale for each row of A and of B
};

constexpr int kNativeTileM = 128, kNativeTileK = 128;
constexpr int kNativeCluster = 2;      // thread blocks that share a tile of A or of B
constexpr int kNativeMaxGroups = 512;  // their boundaries lie in shared memory

// The widest tile whose sums, and partial sums where there are some, fit into registers.
constexpr int native_tile_n(Promotion promotion) { return promotion == Promotion::none ? 256 : 192; }

struct NativeArgs {
  CUtensorMap a, b;          // A [outer, k] or [outer, R]; B [G, N, k] or [1, N, R]; boxes of half a tile
  CUtensorMap d_map, c_map;  // float32: [1, R, N] or [G, M, N], boxes of 64 rows x 32 columns
  const int32_t* offsets;
  int groups, rows;       // G, R
  bool depth;             // GroupKind
  int m, n, k;            // depth: M, N and 0; rows: 0, N and K
  int columns;            // tiles along N
  const float* a_scale;   // [outer >> a_shift, scale_k], or one
  const float* b_scale;   // [G, outer >> b_shift, scale_k], or [G]
  int a_shift, b_shift;   // log2 of a block's rows
  int scale_k;            // blocks along k
  bool whole_scales;      // each four neighbours are 16-byte aligned
  int64_t b_scale_stack;  // elements from one weight's scales to the next
  void* d;
  const void* c;     // null where beta is 0
  const void* bias;  // [G, N], or null
  DType d_type, bias_type;
  float alpha, beta;
};

struct NativeLaunch {
  Promotion promotion;
  bool a_e5m2, b_e5m2;
  int64_t blocks;
};

Status launch_native_tensor(const NativeArgs&, const NativeLaunch&, const Execution&);
Status launch_native_block(const NativeArgs&, const NativeLaunch&, const Execution&);

}  // namespace diptych::cuda
