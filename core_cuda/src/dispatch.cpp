// The public ops: each checks its arguments, looks the kernel up and runs it on the tensors' device.
#include <optional>
#include <string>

#include "contracts/contracts.h"
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

#define OP(name, Args, formats_of, subject_of, ...) \
  std::string subject(const Args& a) { return subject_of; }
#include "diptych/ops.def"

template <typename Args>
Status run(Op op, const Args& args, const Execution& exec) {
  DIPTYCH_TRY(check(args, exec.device));
#ifdef DIPTYCH_WITH_CUDA
  std::optional<cuda::DeviceScope> current;  // makes the tensors' device current, whichever was before
  if (exec.device.backend == Backend::cuda) DIPTYCH_TRY(current.emplace(exec.device.index).status());
#endif
  const auto described = [](const void* a) { return subject(*static_cast<const Args*>(a)); };
  if (std::optional<Status> done = run_first(op, formats(args), &args, exec, described)) return *std::move(done);
  return miss(op, formats(args), exec, subject(args));
}

}  // namespace

#define OP(name, Args, ...) \
  Status name(const Args& a, const Execution& e) { return run(Op::name, a, e); }
#include "diptych/ops.def"

}  // namespace diptych
