// transpose for test_transpose_simulated.py.
#include "diptych/transpose.h"

#include <cstdio>

#include "simulated.h"
#include "tensor.h"

namespace diptych::cuda {
Status cuda_status(cudaError_t, const char*) { return {}; }
}  // namespace diptych::cuda

// Returns 0, or -1 and a message.
extern "C" int transpose(const simulated::Tensor* in, const simulated::Tensor* out, char* message, int size) {
  using namespace diptych;
  const Status status = cuda::transpose({simulated::view(*in), simulated::view(*out)}, {{Backend::cuda, 0}, nullptr});
  std::snprintf(message, static_cast<size_t>(size), "%s", status.message().c_str());
  return status.ok() ? 0 : -1;
}
