#include "cuda/base/tensor_map.h"

#include <cuda_runtime.h>

#include <string>

namespace diptych::cuda {
namespace {

constexpr int kMaxMapRank = 5;

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
  if (error == cudaSuccess && found == cudaDriverEntryPointSuccess) return reinterpret_cast<Encode>(entry);
  (void)cudaGetLastError();  // tensor_maps_available() is then false
  return nullptr;
}

Encode encode() {
  static const Encode entry = find_encode();
  return entry;
}

}  // namespace

bool tensor_maps_available() { return encode() != nullptr; }

Status make_tensor_map(CUtensorMap* map, const void* base, int rank, const int64_t* extents, const int32_t* box) {
  const Encode make = encode();
  if (make == nullptr) return {Code::unsupported, "CUDA: the driver has no cuTensorMapEncodeTiled"};
  cuuint64_t dims[kMaxMapRank], strides[kMaxMapRank];
  cuuint32_t boxes[kMaxMapRank], steps[kMaxMapRank];
  cuuint64_t stride = 1;
  for (int i = 0; i < rank; ++i) {
    dims[i] = static_cast<cuuint64_t>(extents[i]);
    boxes[i] = static_cast<cuuint32_t>(box[i]);
    steps[i] = 1;
    stride *= dims[i];
    strides[i] = stride;  // the stride of dimension i + 1
  }
  const CUresult result =
      make(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, static_cast<cuuint32_t>(rank), const_cast<void*>(base), dims, strides,
           boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {Code::runtime, "CUDA: cuTensorMapEncodeTiled failed with error " + std::to_string(static_cast<int>(result))};
}

}  // namespace diptych::cuda
