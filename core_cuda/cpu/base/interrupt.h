// Long ops can be interrupted. The core does not handle signals: the caller of an op sets a function that tells whether
// to stop.
#pragma once

#include <atomic>

namespace diptych::cpu {

struct Interrupted {};  // thrown by an op that is interrupted

// While it lives, ops that this thread calls run `ask` on this thread about every 50 ms and stop if it returns true.
// `ask` may call other ops. Null: ops are not interrupted.
class Interruptible {
 public:
  using Ask = bool (*)();
  explicit Interruptible(Ask ask);
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

 private:
  Ask outer_;
  long long outer_next_;
};

// While it lives, this thread works on a job that other threads work on too; `failed` tells that one of them has
// failed.
class Shared {
 public:
  explicit Shared(const std::atomic<bool>& failed);
  ~Shared();
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

 private:
  const std::atomic<bool>* outer_;
};

// Ops call it between parts of their work, each of about a millisecond at most. Throws Interrupted if the op should
// stop.
void poll();

}  // namespace diptych::cpu
