// The kernel that permutes rows through shared memory and registers, its host side included, as a library for
// test_permute_simulated.py.
#include <cstdio>

#include "cuda/base/device.h"
#include "simulated.h"
#include "tensor.h"

namespace diptych::cuda {
namespace {
int g_sm_count = 0;
}
DeviceInfo device_info(int) { return {90, g_sm_count}; }
Status cuda_status(cudaError_t, const char*) { return {}; }
}  // namespace diptych::cuda

#include "cuda/permute/slices.cu"

struct Call {
  simulated::Tensor in[diptych::kMaxPlanes], out[diptych::kMaxPlanes];
  simulated::Tensor row_id_map, row_source, probs, permuted_probs;
  uint32_t fill[diptych::kMaxPlanes];
  int32_t planes, sm_count, seed;
};

// 0, or 1 and a message. `launches`: how many there were.
extern "C" int simulate(const Call* call, int* launches, char* message, int size) {
  using namespace diptych;
  PermuteArgs args;
  args.plane_count = call->planes;
  for (int i = 0; i < call->planes; ++i) {
    args.planes[i] = {simulated::view(call->in[i]), simulated::view(call->out[i]), call->fill[i]};
  }
  args.row_id_map = simulated::view(call->row_id_map), args.row_source = simulated::view(call->row_source);
  args.probs = simulated::view(call->probs), args.permuted_probs = simulated::view(call->permuted_probs);
  cuda::g_sm_count = call->sm_count;
  simulated::chance.seed(static_cast<unsigned>(call->seed));
  const int before = simulated::runs;
  const Status status = cuda::permute_slices(args, {{Backend::cuda, 0}, nullptr});
  *launches = simulated::runs - before;
  std::snprintf(message, static_cast<size_t>(size), "%s", status.message().c_str());
  return status.ok() ? 0 : 1;
}
