// The public ops: check, look the kernel up, run it on the tensors' device.
#include <optional>
#include <string>

#include "check.h"
#include "diptych/ops.h"
#include "registry.h"
#ifdef DIPTYCH_WITH_CUDA
#include "cuda/device.h"
#endif

namespace diptych {
namespace {

FormatSet formats(const AmaxArgs&) { return 0; }
FormatSet formats(const QuantizeArgs& a) { return only(a.spec.format); }
FormatSet formats(const ScaleUpdateArgs&) { return 0; }
FormatSet formats(const DequantizeArgs& a) { return only(a.q.format); }
FormatSet formats(const GemmArgs& a) { return only(a.a.format) | only(a.b.format); }
FormatSet formats(const BiasGradArgs&) { return 0; }
FormatSet formats(const NormArgs&) { return 0; }
FormatSet formats(const NormGradArgs&) { return 0; }
FormatSet formats(const ActivationArgs&) { return 0; }
FormatSet formats(const ActivationGradArgs&) { return 0; }

std::string subject(const AmaxArgs& a) { return describe(a.x); }
std::string subject(const QuantizeArgs& a) { return describe(a.x); }
std::string subject(const ScaleUpdateArgs& a) { return describe(a.history); }
std::string subject(const DequantizeArgs& a) { return describe(a.q.data); }
std::string subject(const GemmArgs& a) { return describe(a.a.data) + " x " + describe(a.b.data); }
std::string subject(const BiasGradArgs& a) { return describe(a.dy); }
std::string subject(const NormArgs& a) { return describe(a.x); }
std::string subject(const NormGradArgs& a) { return describe(a.x); }
std::string subject(const ActivationArgs& a) { return describe(a.x); }
std::string subject(const ActivationGradArgs& a) { return describe(a.x); }

template <typename Args>
Status run(Op op, const Args& args, const Execution& exec) {
  DIPTYCH_TRY(check(args, exec.device));
#ifdef DIPTYCH_WITH_CUDA
  std::optional<cuda::DeviceScope> current;  // the tensors' device, whatever the caller's was
  if (exec.device.backend == Backend::cuda) DIPTYCH_TRY(current.emplace(exec.device.index).status());
#endif
  return run_first(op, formats(args), &args, exec, [](const void* a) { return subject(*static_cast<const Args*>(a)); });
}

}  // namespace

Status amax(const AmaxArgs& a, const Execution& e) { return run(Op::amax, a, e); }
Status quantize(const QuantizeArgs& a, const Execution& e) { return run(Op::quantize, a, e); }
Status scale_update(const ScaleUpdateArgs& a, const Execution& e) { return run(Op::scale_update, a, e); }
Status dequantize(const DequantizeArgs& a, const Execution& e) { return run(Op::dequantize, a, e); }
Status gemm(const GemmArgs& a, const Execution& e) { return run(Op::gemm, a, e); }
Status bias_grad(const BiasGradArgs& a, const Execution& e) { return run(Op::bias_grad, a, e); }
Status norm(const NormArgs& a, const Execution& e) { return run(Op::norm, a, e); }
Status norm_grad(const NormGradArgs& a, const Execution& e) { return run(Op::norm_grad, a, e); }
Status activation(const ActivationArgs& a, const Execution& e) { return run(Op::activation, a, e); }
Status activation_grad(const ActivationGradArgs& a, const Execution& e) { return run(Op::activation_grad, a, e); }

}  // namespace diptych
