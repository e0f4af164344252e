// The public ops: each checks its arguments, looks the kernel up and runs it on the tensors' device.
#include <optional>
#include <string>

#include "contracts/contracts.h"
#include "diptych/grouped.h"
#include "diptych/ops.h"
#include "registry.h"
#ifdef DIPTYCH_WITH_CUDA
#include "cuda/base/device.h"
#endif

namespace diptych {
namespace {

#define OP(name, Args, formats_of, ...) \
  FormatSet formats([[maybe_unused]] const Args& a) { return formats_of; }
#include "diptych/ops.def"
#define OP(name, Args, formats_of, ...) \
  FormatSet formats([[maybe_unused]] const Args& a) { return formats_of; }
#include "diptych/lone_ops.def"

#define OP(name, Args, formats_of, subject_of, ...) \
  std::string subject(const Args& a) { return subject_of; }
#include "diptych/ops.def"
#define OP(name, Args, formats_of, subject_of, ...) \
  std::string subject(const Args& a) { return subject_of; }
#include "diptych/lone_ops.def"

template <typename Args>
std::optional<Status> run_checked(Op op, const Args& args, const Execution& exec) {
#ifdef DIPTYCH_WITH_CUDA
  std::optional<cuda::DeviceScope> current;  // makes the tensors' device current, whichever was before
  if (exec.device.backend == Backend::cuda) DIPTYCH_TRY(current.emplace(exec.device.index).status());
#endif
  return run_first(op, formats(args), &args, exec, [](const void* a) { return subject(*static_cast<const Args*>(a)); });
}

template <typename Args>
Status run(Op op, const Args& args, const Execution& exec) {
  DIPTYCH_TRY(check(args, exec.device));
  if (std::optional<Status> done = run_checked(op, args, exec)) return *std::move(done);
  return miss(op, formats(args), exec, subject(args));
}

}  // namespace

std::optional<Status> quantize_together(const QuantizeArgs& stack, const Execution& exec) {
  return run_checked(Op::quantize_stack, stack, exec);
}

#define OP(name, Args, ...) \
  Status name(const Args& a, const Execution& e) { return run(Op::name, a, e); }
#include "diptych/ops.def"
#define OP(name, Args, ...) \
  Status name(const Args& a, const Execution& e) { return run(Op::name, a, e); }
#include "diptych/lone_ops.def"

}  // namespace diptych
