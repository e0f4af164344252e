// The public ops: check, look the kernel up, run it on the tensors' device.
#include <optional>
#include <string>

#include "check.h"
#include "diptych/grouped.h"
#include "diptych/ops.h"
#include "registry.h"
#ifdef DIPTYCH_WITH_CUDA
#include "cuda/device.h"
#endif

namespace diptych {
namespace {

FormatSet formats(const AmaxArgs&) { return 0; }
FormatSet formats(const QuantizeArgs& a) { return only(a.spec.format); }
FormatSet formats(const LogAmaxArgs&) { return 0; }
FormatSet formats(const ScaleUpdateArgs&) { return 0; }
FormatSet formats(const DequantizeArgs& a) { return only(a.q.format); }
FormatSet formats(const GemmArgs& a) { return only(a.a.format) | only(a.b.format); }
FormatSet formats(const BiasGradArgs&) { return 0; }
FormatSet formats(const NormArgs&) { return 0; }
FormatSet formats(const NormGradArgs&) { return 0; }
FormatSet formats(const ActivationArgs&) { return 0; }
FormatSet formats(const ActivationGradArgs&) { return 0; }
FormatSet formats(const PermuteMapArgs&) { return 0; }
FormatSet formats(const ChunkMapArgs&) { return 0; }
FormatSet formats(const InvertMapArgs&) { return 0; }
FormatSet formats(const PermuteArgs&) { return 0; }
FormatSet formats(const PermuteColumnsArgs&) { return 0; }
FormatSet formats(const UnpermuteArgs&) { return 0; }
FormatSet formats(const UnpermuteGradArgs&) { return 0; }
FormatSet formats(const GroupedGemmArgs& a) { return only(a.a.format) | only(a.b.format); }
FormatSet formats(const GroupedBiasGradArgs&) { return 0; }

std::string subject(const AmaxArgs& a) { return describe(a.x); }
std::string subject(const QuantizeArgs& a) { return describe(a.x); }
std::string subject(const LogAmaxArgs& a) { return describe(a.amax); }
std::string subject(const ScaleUpdateArgs& a) { return describe(a.history); }
std::string subject(const DequantizeArgs& a) { return describe(a.q.data); }
std::string subject(const GemmArgs& a) { return describe(a.a.data) + " x " + describe(a.b.data); }
std::string subject(const BiasGradArgs& a) { return describe(a.dy); }
std::string subject(const NormArgs& a) { return describe(a.x); }
std::string subject(const NormGradArgs& a) { return describe(a.x); }
std::string subject(const ActivationArgs& a) { return describe(a.x); }
std::string subject(const ActivationGradArgs& a) { return describe(a.x); }
std::string subject(const PermuteMapArgs& a) { return describe(a.routing); }
std::string subject(const ChunkMapArgs& a) { return describe(a.split_sizes); }
std::string subject(const InvertMapArgs& a) { return describe(a.row_id_map); }
std::string subject(const PermuteArgs& a) { return describe(a.planes[0].in); }
std::string subject(const PermuteColumnsArgs& a) { return describe(a.in); }
std::string subject(const UnpermuteArgs& a) { return describe(a.x); }
std::string subject(const UnpermuteGradArgs& a) { return describe(a.dy); }
std::string subject(const GroupedGemmArgs& a) {
  return describe(a.a.data) + " x " + describe(a.b.data) + " in " + std::to_string(a.offsets.numel() - 1) + " groups";
}
std::string subject(const GroupedBiasGradArgs& a) { return describe(a.dy); }

template <typename Args>
Status run_checked(Op op, const Args& args, const Execution& exec) {
#ifdef DIPTYCH_WITH_CUDA
  std::optional<cuda::DeviceScope> current;  // the tensors' device, whatever the caller's was
  if (exec.device.backend == Backend::cuda) DIPTYCH_TRY(current.emplace(exec.device.index).status());
#endif
  return run_first(op, formats(args), &args, exec, [](const void* a) { return subject(*static_cast<const Args*>(a)); });
}

template <typename Args>
Status run(Op op, const Args& args, const Execution& exec) {
  DIPTYCH_TRY(check(args, exec.device));
  return run_checked(op, args, exec);
}

}  // namespace

std::optional<Status> quantize_together(const QuantizeArgs& stack, const Execution& exec) {
  if (find_row(Op::quantize_stack, formats(stack), &stack, exec.device) < 0) return std::nullopt;
  return run_checked(Op::quantize_stack, stack, exec);
}

Status amax(const AmaxArgs& a, const Execution& e) { return run(Op::amax, a, e); }
Status quantize(const QuantizeArgs& a, const Execution& e) { return run(Op::quantize, a, e); }
Status log_amax(const LogAmaxArgs& a, const Execution& e) { return run(Op::log_amax, a, e); }
Status scale_update(const ScaleUpdateArgs& a, const Execution& e) { return run(Op::scale_update, a, e); }
Status dequantize(const DequantizeArgs& a, const Execution& e) { return run(Op::dequantize, a, e); }
Status gemm(const GemmArgs& a, const Execution& e) { return run(Op::gemm, a, e); }
Status bias_grad(const BiasGradArgs& a, const Execution& e) { return run(Op::bias_grad, a, e); }
Status norm(const NormArgs& a, const Execution& e) { return run(Op::norm, a, e); }
Status norm_grad(const NormGradArgs& a, const Execution& e) { return run(Op::norm_grad, a, e); }
Status activation(const ActivationArgs& a, const Execution& e) { return run(Op::activation, a, e); }
Status activation_grad(const ActivationGradArgs& a, const Execution& e) { return run(Op::activation_grad, a, e); }
Status permute_map(const PermuteMapArgs& a, const Execution& e) { return run(Op::permute_map, a, e); }
Status chunk_map(const ChunkMapArgs& a, const Execution& e) { return run(Op::chunk_map, a, e); }
Status invert_map(const InvertMapArgs& a, const Execution& e) { return run(Op::invert_map, a, e); }
Status permute(const PermuteArgs& a, const Execution& e) { return run(Op::permute, a, e); }
Status permute_columns(const PermuteColumnsArgs& a, const Execution& e) { return run(Op::permute_columns, a, e); }
Status unpermute(const UnpermuteArgs& a, const Execution& e) { return run(Op::unpermute, a, e); }
Status unpermute_grad(const UnpermuteGradArgs& a, const Execution& e) { return run(Op::unpermute_grad, a, e); }
Status grouped_gemm(const GroupedGemmArgs& a, const Execution& e) { return run(Op::grouped_gemm, a, e); }
Status grouped_bias_grad(const GroupedBiasGradArgs& a, const Execution& e) { return run(Op::grouped_bias_grad, a, e); }

}  // namespace diptych
