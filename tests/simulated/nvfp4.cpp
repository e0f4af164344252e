// The NVFP4 kernel with plain tensors and given amaxes, for test_quantize_parts_simulated.py. The addresses of x are
// odd multiples of its element: the asynchronous copies of whole vectors know no memory that a kernel declares.
#include "cuda/quantize/quantize.h"
#include "cuda/source/source.cuh"
#include "simulated.h"
#include "tensor.h"

namespace diptych::cuda {

DeviceInfo device_info(int) { return {90, 4, 228}; }
Status cuda_status(cudaError_t, const char*) { return {}; }
Status amax(const AmaxArgs&, const Execution&) { std::abort(); }

}  // namespace diptych::cuda

// Returns 0, or 1 and a message. `flags`: the options of quantize.
extern "C" int quantize_nvfp4(const simulated::Tensor* t, int format, int flags, char* message, int size) {
  using namespace diptych;
  using simulated::view;
  QuantizeArgs args;
  args.x = view(t[0]), args.spec = {FormatId{format}, flags, 0.0f}, args.amax_mode = AmaxMode::given;
  args.amax = view(t[1]), args.columnwise_amax = view(t[2]), args.rng = view(t[3]);
  args.rowwise = {args.spec.format, false, view(t[4]), view(t[5]), {}};
  args.columnwise = {args.spec.format, true, view(t[6]), view(t[7]), {}};
  const Status status = cuda::quantize_nvfp4(args, {{Backend::cuda, 0}, nullptr});
  std::snprintf(message, static_cast<size_t>(size), "%s", status.message().c_str());
  return status.ok() ? 0 : 1;
}
