// The part of cuBLASLt's C interface that is used here, written out so that no cuBLAS header is needed to build.
// Names and numbers: NVIDIA's cuBLAS documentation, "cuBLASLt Datatypes Reference" and "API Reference".
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>

namespace diptych::cuda::cublaslt {

using Result = int;  // cublasStatus_t
constexpr Result kSuccess = 0;

using Handle = void*;
using MatmulDesc = void*;
using MatrixLayout = void*;
using Preference = void*;

struct Algo {  // opaque; may be copied and kept for use with the same library
  uint64_t data[8];
};
struct Heuristic {
  Algo algo;
  size_t workspace_bytes;
  Result state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Algo) == 64 && sizeof(Heuristic) == 96);

constexpr int kCompute32F = 68;                // cublasComputeType_t
constexpr int32_t kOpN = 0, kOpT = 1;          // cublasOperation_t
constexpr uint32_t kEpilogueBias = 4;          // cublasLtEpilogue_t
constexpr uint32_t kReductionComputeType = 2;  // a bit of cublasLtReductionScheme_t, where no reduction is 0

enum class DescAttr : int {  // cublasLtMatmulDescAttributes_t
  trans_a = 3,               // int32
  trans_b = 4,               // int32
  epilogue = 7,              // uint32
  bias_pointer = 8,          // device pointer
  a_scale_pointer = 17,      // device pointer
  b_scale_pointer = 18,      // device pointer
  fast_accum = 25,           // int8
  bias_data_type = 26,       // int32, a cudaDataType
  a_scale_mode = 31,         // int32, a ScaleMode
  b_scale_mode = 32,         // int32, a ScaleMode
};
enum class PrefAttr : int {   // cublasLtMatmulPreferenceAttributes_t
  max_workspace_bytes = 1,    // uint64
  reduction_scheme_mask = 3,  // uint32
  min_alignment_a = 5,        // uint32, as for b, c and d
  min_alignment_b = 6,
  min_alignment_c = 7,
  min_alignment_d = 8,
};
enum class ScaleMode : int32_t {  // cublasLtMatmulMatrixScale_t
  scalar_32f = 0,
  vec128_32f = 4,
  block128x128_32f = 5,
};

// The entry points, each with the name that dlsym looks up.
struct Api {
  size_t (*GetVersion)();  // major * 10000 + minor * 100 + patch
  Result (*Create)(Handle*);
  Result (*MatmulDescCreate)(MatmulDesc*, int compute_type, int scale_type);
  Result (*MatmulDescDestroy)(MatmulDesc);
  Result (*MatmulDescSetAttribute)(MatmulDesc, int attr, const void* value, size_t bytes);
  Result (*MatrixLayoutCreate)(MatrixLayout*, int type, uint64_t rows, uint64_t cols, int64_t ld);
  Result (*MatrixLayoutDestroy)(MatrixLayout);
  Result (*MatmulPreferenceCreate)(Preference*);
  Result (*MatmulPreferenceDestroy)(Preference);
  Result (*MatmulPreferenceSetAttribute)(Preference, int attr, const void* value, size_t bytes);
  Result (*MatmulAlgoGetHeuristic)(Handle, MatmulDesc, MatrixLayout a, MatrixLayout b, MatrixLayout c, MatrixLayout d,
                                   Preference, int requested, Heuristic* results, int* returned);
  Result (*Matmul)(Handle, MatmulDesc, const void* alpha, const void* a, MatrixLayout, const void* b, MatrixLayout,
                   const void* beta, const void* c, MatrixLayout, void* d, MatrixLayout, const Algo*, void* workspace,
                   size_t workspace_bytes, cudaStream_t);
};

}  // namespace diptych::cuda::cublaslt
