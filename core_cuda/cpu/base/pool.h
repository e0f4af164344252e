// A small thread pool. Work is cut by the caller, never by the pool, so that results cannot depend on the thread count.
#pragma once

#include <cstdint>
#include <functional>

namespace diptych::cpu {

// Runs task(0) .. task(count - 1), in any order and on any thread, each under IEEE float rules (no FTZ, no DAZ,
// round to nearest), and returns when all are done. Safe after fork and from several threads at once. Once a task has
// thrown, or the caller is asked to stop (interrupt.h), no further ones start; those under way end before it throws.
void parallel_for(int64_t count, const std::function<void(int64_t)>& task);

inline constexpr int kMaxThreads = 1024;  // more than processors of nearly any machine, and few enough to start

void set_num_threads(int n);  // 1..kMaxThreads; threads that are then too many end
int num_threads();

// Sets this thread's float environment to IEEE (MXCSR on x86, FPCR on Arm) and restores it on leaving the scope.
// XLA:CPU calls its handlers with flush-to-zero on.
class IeeeScope {
 public:
  IeeeScope();
  ~IeeeScope();
  IeeeScope(const IeeeScope&) = delete;
  IeeeScope& operator=(const IeeeScope&) = delete;

 private:
  uint64_t saved_;
};

}  // namespace diptych::cpu
