// The native kernel of grouped products, its host side included, as a library for test_grouped_gemm_simulated.py.
#include <cstdio>

#include "cuda/base/device.h"
#include "cuda/base/tensor_map.h"
#include "cuda/ptx/tensor_copy.cuh"
#include "simulated.h"
#include "tensor.h"

namespace diptych::cuda {
namespace {
int g_sm_count = 0;
int64_t g_most = 0;  // kMost of decoded.cpp, where a test lets it be a variable
}  // namespace
DeviceInfo device_info(int) { return {90, g_sm_count}; }
Status cuda_status(cudaError_t, const char*) { return {}; }
bool tensor_maps_available() { return true; }
Status make_tensor_map(CUtensorMap* map, const void* base, int rank, const int64_t* extents, const int32_t* box) {
  simulated::Map m{static_cast<unsigned char*>(const_cast<void*>(base)), {1, 1, 1}, {1, 1, 1}};
  for (int i = 0; i < rank; ++i) m.extents[i] = extents[i], m.box[i] = box[i];
  std::memcpy(map, &m, sizeof(m));
  return {};
}
}  // namespace diptych::cuda

#include "cuda/products/decoded.cpp"
#include "cuda/products/sm90.cpp"
#include "cuda/products/sm90_bf16.cu"
#include "cuda/products/sm90_block.cu"
#include "cuda/products/sm90_tensor.cu"

extern "C" cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

struct Call {
  simulated::Tensor a_data, a_scale_inv, a_amax, b_data, b_scale_inv, b_amax, offsets, d, c, bias;
  int32_t a_format, a_columnwise, b_format, b_columnwise, kind, align, fast_accum, tall, sm_count, seed, most;
  float alpha, beta;
};

extern "C" int64_t workspace_bytes(int a, int b, int64_t m, int64_t n, int64_t k, int64_t groups, int by_groups) {
  return diptych::cuda::decoded_workspace_bytes(diptych::FormatId{a}, diptych::FormatId{b}, m, n, k, groups,
                                                by_groups != 0);
}

// 0, or 1 and a message, or -1 where the kernel does not take such a product.
extern "C" int simulate(const Call* call, char* message, int size) {
  using namespace diptych;
  using simulated::view;
  GroupedGemmArgs args;
  args.kind = static_cast<GroupKind>(call->kind);
  args.a = {FormatId{call->a_format}, call->a_columnwise != 0, view(call->a_data), view(call->a_scale_inv),
            view(call->a_amax)};
  args.b = {FormatId{call->b_format}, call->b_columnwise != 0, view(call->b_data), view(call->b_scale_inv),
            view(call->b_amax)};
  args.offsets = view(call->offsets), args.d = view(call->d), args.c = view(call->c), args.bias = view(call->bias);
  args.align = call->align, args.alpha = call->alpha, args.beta = call->beta,
  args.options.fast_accum = call->fast_accum != 0;
  cuda::g_sm_count = call->sm_count, cuda::g_most = call->most;
  simulated::chance.seed(static_cast<unsigned>(call->seed));
  const cuda::NativeShape s = cuda::native_shape(args);
  std::vector<unsigned char> workspace(
      static_cast<size_t>(cuda::decoded_workspace_bytes(args.a.format, args.b.format, s.m, s.n, s.k, s.groups,
                                                        args.kind == GroupKind::rows && args.offsets.given())),
      0xee);
  args.workspace.data = workspace.data();
  const bool decoded = cuda::grouped_gemm_decoded_fits(args);
  if (!decoded && !cuda::grouped_gemm_native_fits(args)) return -1;
  const Execution exec{{Backend::cuda, 0}, nullptr};
  const Status status =
      decoded ? cuda::grouped_gemm_decoded(args, exec) : cuda::multiply_native(args, call->tall != 0, exec);
  std::snprintf(message, static_cast<size_t>(size), "%s", status.message().c_str());
  return status.ok() ? 0 : 1;
}
