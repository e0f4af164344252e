// The public ops: check, look the kernel up, run it on the tensors' device.
#include <string>

#include "check.h"
#include "diptych/ops.h"
#include "registry.h"
#ifdef DIPTYCH_WITH_CUDA
#include "cuda/kernels.h"
#endif

namespace diptych {
namespace {

FormatSet formats(const AmaxArgs&) { return 0; }
FormatSet formats(const QuantizeArgs& a) { return only(a.spec.format); }
FormatSet formats(const DequantizeArgs& a) { return only(a.q.format); }
FormatSet formats(const GemmArgs& a) { return only(a.a.format) | only(a.b.format); }
FormatSet formats(const BiasGradArgs&) { return 0; }

std::string subject(const AmaxArgs& a) { return describe(a.x); }
std::string subject(const QuantizeArgs& a) { return describe(a.x); }
std::string subject(const DequantizeArgs& a) { return describe(a.q.data); }
std::string subject(const GemmArgs& a) { return describe(a.a.data) + " x " + describe(a.b.data); }
std::string subject(const BiasGradArgs& a) { return describe(a.dy); }

// The tensors' device is current inside, whatever the caller's was.
class DeviceScope {
 public:
  explicit DeviceScope(const Device& device) {
#ifdef DIPTYCH_WITH_CUDA
    if (device.backend == Backend::cuda) status_ = cuda::use_device(device.index, &previous_);
#else
    (void)device;
#endif
  }
  ~DeviceScope() {
#ifdef DIPTYCH_WITH_CUDA
    if (previous_ >= 0) (void)cuda::use_device(previous_, nullptr).ok();
#endif
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  const Status& status() const { return status_; }

 private:
  int previous_ = -1;
  Status status_;
};

template <typename Args>
Status run(Op op, const Args& args, const Execution& exec) {
  DIPTYCH_TRY(check(args, exec.device));
  const DeviceScope scope(exec.device);
  DIPTYCH_TRY(scope.status());
  return run_first(op, formats(args), &args, exec,
                   [](const void* a) { return subject(*static_cast<const Args*>(a)); });
}

}  // namespace

Status amax(const AmaxArgs& a, const Execution& e) { return run(Op::amax, a, e); }
Status quantize(const QuantizeArgs& a, const Execution& e) { return run(Op::quantize, a, e); }
Status dequantize(const DequantizeArgs& a, const Execution& e) { return run(Op::dequantize, a, e); }
Status gemm(const GemmArgs& a, const Execution& e) { return run(Op::gemm, a, e); }
Status bias_grad(const BiasGradArgs& a, const Execution& e) { return run(Op::bias_grad, a, e); }

#ifdef DIPTYCH_WITH_CUDA
int64_t gemm_workspace_bytes(int64_t m, int64_t n, int64_t k) { return cuda::gemm_workspace_bytes(m, n, k); }
int64_t bias_grad_workspace_bytes(int64_t m, int64_t n) { return cuda::bias_grad_workspace_bytes(m, n); }
#else
int64_t gemm_workspace_bytes(int64_t, int64_t, int64_t) { return 0; }
int64_t bias_grad_workspace_bytes(int64_t, int64_t) { return 0; }
#endif

}  // namespace diptych
