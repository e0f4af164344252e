// statistics for test_statistics_simulated.py.
#include "diptych/statistics.h"

#include <cstdio>

#include "cuda/base/device.h"
#include "simulated.h"
#include "tensor.h"

namespace diptych::cuda {
Status cuda_status(cudaError_t, const char*) { return {}; }
}  // namespace diptych::cuda

// Returns 0, or -1 and a message.
extern "C" int statistics(const simulated::Tensor* x, const simulated::Tensor* result, const simulated::Tensor* largest,
                          const simulated::Tensor* out, const simulated::Tensor* workspace, int number, float beyond,
                          char* message, int size) {
  using namespace diptych;
  const StatisticsArgs args{simulated::view(*x),
                            simulated::view(*result),
                            simulated::view(*largest),
                            simulated::view(*out),
                            simulated::view(*workspace),
                            static_cast<Number>(number),
                            beyond};
  const Status status = cuda::statistics(args, {{Backend::cuda, 0}, nullptr});
  std::snprintf(message, static_cast<size_t>(size), "%s", status.message().c_str());
  return status.ok() ? 0 : -1;
}
