// Long ops stop where their caller asks them to. The core knows no signals: who calls an op says whom to ask.
#pragma once

#include <atomic>

namespace diptych::cpu {

struct Interrupted {};  // thrown out of an op that was asked to stop

// While it lives, ops that this thread calls ask `ask`, on this thread, about every 50 ms whether to stop; it may call
// other ops itself. Null: nobody is asked.
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

// While it lives, this thread works on something of which another thread may say that it has failed.
class Shared {
 public:
  explicit Shared(const std::atomic<bool>& failed);
  ~Shared();
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

 private:
  const std::atomic<bool>* outer_;
};

// Called between parts of an op's work, none of which takes much longer than a millisecond or so. Throws Interrupted.
void poll();

}  // namespace diptych::cpu
