// What every CPU op does around its work: float environment, errors, and whether waking threads pays.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "cpu/pool.h"
#include "diptych/status.h"

namespace diptych::cpu {

// Under IEEE float rules; no exception leaves the core.
template <class Fn>
Status guarded(const char* op, Fn fn) {
  try {
    IeeeScope ieee;
    return fn();
  } catch (const std::bad_alloc&) {
    return Status(Code::runtime, std::string(op) + ": not enough memory for its working space");
  } catch (const std::exception& e) {
    return Status(Code::runtime, std::string(op) + ": " + e.what());
  }
}

// Task i of `count`, here or on the pool. How work is cut never changes its bits, so neither does the choice.
template <class Fn>
void for_tasks(int64_t count, bool threaded, const Fn& fn) {
  if (threaded && count > 1) {
    parallel_for(count, fn);
  } else {
    for (int64_t i = 0; i < count; ++i) fn(i);
  }
}

inline constexpr int64_t kThreadedElements = 1 << 16;  // below this, waking a thread costs more than it saves

}  // namespace diptych::cpu
