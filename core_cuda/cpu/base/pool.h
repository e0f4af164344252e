// A small thread pool. The caller divides work into tasks, never the pool, so results cannot depend on the thread
// count.
#pragma once

#include <cstdint>
#include <functional>

namespace diptych::cpu {

// Runs task(0) .. task(count - 1), in any order and on any thread, each under IEEE float rules (no FTZ, no DAZ,
// round to nearest), and returns when all are done. Safe after fork and from several threads at once. Once a task has
// thrown, or the op is interrupted (interrupt.h), no further tasks start; parallel_for throws after the running ones
// have ended.
void parallel_for(int64_t count, const std::function<void(int64_t)>& task);

inline constexpr int kMaxThreads = 1024;  // more than most machines have processors, and few enough to start

void set_num_threads(int n);  // 1..kMaxThreads; surplus threads end
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
