#include "cpu/base/interrupt.h"

#include <chrono>

#include "cpu/base/scratch.h"

namespace diptych::cpu {
namespace {

constexpr long long kEvery = 50'000'000;  // ns

thread_local Interruptible::Ask ask = nullptr;
thread_local long long next = 0;  // when to ask again; 0: the clock has not been read yet
thread_local const std::atomic<bool>* failed_elsewhere = nullptr;

long long now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// While `ask` runs it may call ops itself. They use other scratch memory, and do not stop because this op does.
class Aside {
 public:
  Aside() : ask_(ask), failed_(failed_elsewhere) {
    ask = nullptr;
    failed_elsewhere = nullptr;
    exchange_scratch(scratch_);
  }
  ~Aside() {
    exchange_scratch(scratch_);
    ask = ask_;
    failed_elsewhere = failed_;
  }
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;

 private:
  Interruptible::Ask ask_;
  const std::atomic<bool>* failed_;
  ScratchSlots scratch_;
};

}  // namespace

Interruptible::Interruptible(Ask asked) : outer_(ask), outer_next_(next) {
  ask = asked;
  next = 0;
}

Interruptible::~Interruptible() {
  ask = outer_;
  next = outer_next_;
}

Shared::Shared(const std::atomic<bool>& failed) : outer_(failed_elsewhere) { failed_elsewhere = &failed; }
Shared::~Shared() { failed_elsewhere = outer_; }

void poll() {
  if (failed_elsewhere && failed_elsewhere->load(std::memory_order_relaxed)) throw Interrupted{};
  if (!ask) return;
  const long long t = now();
  if (t < next) return;
  const bool first = next == 0;
  next = t + kEvery;
  if (first) return;
  bool stop;
  {
    const Interruptible::Ask asked = ask;
    const Aside aside;
    stop = asked();
  }
  if (stop) throw Interrupted{};
}

}  // namespace diptych::cpu
