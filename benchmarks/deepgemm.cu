// DeepGEMM's kernel for groups of rows, launched the way its own host code does, for benchmarks/deepgemm.py. Its
// sources and CUTLASS's headers come from the caller; shapes are compiled in, as DeepGEMM does it.
#include <cuda.h>
#include <cuda_runtime.h>

#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>

#include "shapes.h"  // SHAPES: SHAPE(groups, N, K) for each, numbered in order

struct Operands {
  void *a, *a_scale_t, *b;
  float* b_scale;
  void* d;
  int* group_of_row;
  int rows;
  cudaStream_t stream;
};

namespace {

constexpr int kTileM = 128, kTileK = 128, kCluster = 2, kSms = 132, kStages = 4;

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

// 0, a CUDA error, or -1 where the driver has no tensor maps.
template <int kGroups, int kN, int kK, int kTileN, bool kSharesA>
int multiply(const Operands& o) {
  constexpr int kBlocks = (kK + kTileK - 1) / kTileK;
  constexpr int kShared = kTileM * kTileN * 2 + kStages * (kTileM * kTileK + kTileN * kTileK + kTileM * 4) +
                          2 * kBlocks * 4 + 8 + 2 * kStages * 8 + 1024;
  const auto kernel =
      deep_gemm::sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, kN, kK, kGroups, kTileM, kTileN, kTileK, 128, 128,
                                         128, kStages, 128, 256, kCluster, kSharesA, kSms,
                                         deep_gemm::GemmType::MGroupedContiguous, cutlass::bfloat16_t,
                                         deep_gemm::epilogue::transform::EpilogueIdentity>;
  if (const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared))
    return error;
  constexpr auto kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  constexpr auto kSwizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  CUtensorMap a, b, d, scales;
  if (!make_map(&a, o.a, kBytes, 1, kK, o.rows, kTileK, kTileM, kSwizzle) ||
      !make_map(&b, o.b, kBytes, 1, kK, kN * kGroups, kTileK, kTileN, kSwizzle) ||
      !make_map(&d, o.d, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, kN, o.rows, 64, kTileM, kSwizzle) ||
      !make_map(&scales, o.a_scale_t, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, o.rows, kBlocks, kTileM, 1,
                CU_TENSOR_MAP_SWIZZLE_NONE)) {
    return -1;
  }
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = kSms, config.blockDim = 384, config.dynamicSmemBytes = kShared, config.stream = o.stream;
  config.attrs = &cluster, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, o.b_scale, o.group_of_row, static_cast<uint32_t>(o.rows), uint32_t{kN},
                            uint32_t{kK}, a, b, d, scales);
}

}  // namespace

extern "C" int deepgemm(int shape, const Operands* operands) {
  int i = 0;
#define SHAPE(groups, n, k) \
  if (i++ == shape) return multiply<groups, n, k, 192, false>(*operands);
  SHAPES
#undef SHAPE
  return cudaErrorInvalidValue;
}
