// DeepGEMM's kernels for block scales, launched the way its own host code does, for benchmarks/deepgemm.py. Their
// sources and CUTLASS's headers come from the caller.
#include <cuda.h>
#include <cuda_runtime.h>

#include <deep_gemm/impls/sm90_fp8_gemm_1d1d.cuh>
#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>

#include "shapes.h"  // SHAPES: SHAPE(groups, N, K) for each that the 1d2d kernel is compiled for, as DeepGEMM does it

// D [m, n] of A [m, k] and B [groups, n, k]. Scales of blocks of 1 x 128 are transposed: [k / 128, rows].
struct Operands {
  void *a, *a_scale, *b, *b_scale, *d;
  int* group_of_row;  // of A, where there are several groups
  int groups, m, n, k;
  cudaStream_t stream;
};

namespace {

constexpr int kTileM = 128, kTileK = 128, kCluster = 2, kSms = 132, kStages = 4, kLoaders = 128, kMultipliers = 256;
constexpr int kNoTensorMap = -1, kNotCompiled = -2;  // results beside CUDA's errors
constexpr auto kByte = CU_TENSOR_MAP_DATA_TYPE_UINT8, kFloat = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
constexpr auto kPlain = CU_TENSOR_MAP_SWIZZLE_NONE, kSwizzle = CU_TENSOR_MAP_SWIZZLE_128B;

bool make_map(CUtensorMap* map, void* base, CUtensorMapDataType type, int bytes, int inner, int outer, int box_inner,
              int box_outer, CUtensorMapSwizzle swizzle) {
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  if (encode == nullptr) {
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&encode), 12000,
                                     cudaEnableDefault, &found);
    if (encode == nullptr) return false;
  }
  const cuuint64_t extents[2] = {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(outer)};
  const cuuint64_t stride[1] = {static_cast<cuuint64_t>(inner) * bytes};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_inner), static_cast<cuuint32_t>(box_outer)}, steps[2] = {1, 1};
  return encode(map, type, 2, base, extents, stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class Kernel, class... Arguments>
int launch(Kernel kernel, int shared, cudaStream_t stream, Arguments... arguments) {
  if (const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)) return error;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = kSms, config.blockDim = kLoaders + kMultipliers, config.dynamicSmemBytes = shared;
  config.stream = stream, config.attrs = &cluster, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// D bfloat16; blocks of B are 128 x 128.
template <int kGroups, int kN, int kK>
int multiply_1d2d(const Operands& o) {
  constexpr int kTileN = 192, kBlocks = (kK + kTileK - 1) / kTileK;
  constexpr int kShared = kTileM * kTileN * 2 + kStages * (kTileM * kTileK + kTileN * kTileK + kTileM * 4) +
                          2 * kBlocks * 4 + 8 + 2 * kStages * 8 + 1024;
  constexpr auto kType = kGroups == 1 ? deep_gemm::GemmType::Normal : deep_gemm::GemmType::MGroupedContiguous;
  const auto kernel =
      deep_gemm::sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, kN, kK, kGroups, kTileM, kTileN, kTileK, 128, 128,
                                         128, kStages, kLoaders, kMultipliers, kCluster, false, kSms, kType,
                                         cutlass::bfloat16_t, deep_gemm::epilogue::transform::EpilogueIdentity>;
  CUtensorMap a, b, d, a_scale;
  if (!make_map(&a, o.a, kByte, 1, kK, o.m, kTileK, kTileM, kSwizzle) ||
      !make_map(&b, o.b, kByte, 1, kK, kN * kGroups, kTileK, kTileN, kSwizzle) ||
      !make_map(&d, o.d, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, kN, o.m, 64, kTileM, kSwizzle) ||
      !make_map(&a_scale, o.a_scale, kFloat, 4, o.m, kBlocks, kTileM, 1, kPlain)) {
    return kNoTensorMap;
  }
  return launch(kernel, kShared, o.stream, static_cast<float*>(o.b_scale), o.group_of_row, o.m, kN, kK, a, b, d,
                a_scale);
}

// Adds to D float32; blocks of B are 1 x 128.
int multiply_1d1d(const Operands& o) {
  constexpr int kTileN = 152, kScalesN = (kTileN * 4 + 127) / 128 * 128;  // bytes, as they are aligned
  constexpr int kShared = kTileM * kTileN * 4 + kStages * (kTileM * kTileK + kTileN * kTileK + kTileM * 4 + kScalesN) +
                          2 * kStages * 8 + 1024;
  const auto kernel =
      deep_gemm::sm90_fp8_gemm_1d1d_impl<0, 0, 0, 1, kTileM, kTileN, kTileK, 128, 128, kStages, kLoaders, kMultipliers,
                                         kCluster, false, kSms, deep_gemm::GemmType::Normal, float>;
  const int blocks = (o.k + kTileK - 1) / kTileK;
  CUtensorMap a, b, d, a_scale, b_scale;
  if (!make_map(&a, o.a, kByte, 1, o.k, o.m, kTileK, kTileM, kSwizzle) ||
      !make_map(&b, o.b, kByte, 1, o.k, o.n, kTileK, kTileN, kSwizzle) ||
      !make_map(&d, o.d, kFloat, 4, o.n, o.m, kTileN, 64, kPlain) ||
      !make_map(&a_scale, o.a_scale, kFloat, 4, o.m, blocks, kTileM, 1, kPlain) ||
      !make_map(&b_scale, o.b_scale, kFloat, 4, o.n, blocks, kTileN, 1, kPlain)) {
    return kNoTensorMap;
  }
  // Only products grouped along K read the pointers.
  return launch(kernel, kShared, o.stream, nullptr, nullptr, nullptr, nullptr, o.m, o.n, o.k, a, b, a_scale, b_scale,
                d);
}

}  // namespace

extern "C" int deepgemm_1d2d(const Operands* o) {
#define SHAPE(groups_, n_, k_) \
  if (o->groups == groups_ && o->n == n_ && o->k == k_) return multiply_1d2d<groups_, n_, k_>(*o);
  SHAPES
#undef SHAPE
  return kNotCompiled;
}

extern "C" int deepgemm_1d1d(const Operands* o) { return o->groups == 1 ? multiply_1d1d(*o) : kNotCompiled; }
