// What every CPU op needs around its work: the float environment, error handling, and the choice of using threads.
#pragma once

#include <algorithm>
#include <exception>
#include <new>
#include <string>

#include "cpu/base/interrupt.h"
#include "cpu/base/pool.h"
#include "cpu/isa/isa.h"
#include "diptych/status.h"

namespace diptych::cpu {

// Runs fn under IEEE float rules and turns exceptions into a Status, so that none leaves the core.
template <class Fn>
Status guarded(const char* op, Fn fn) {
  try {
    IeeeScope ieee;
    return fn();
  } catch (const Interrupted&) {
    return Status(Code::interrupted, std::string(op) + ": interrupted; its outputs are undefined");
  } catch (const std::bad_alloc&) {
    return Status(Code::runtime, std::string(op) + ": not enough memory for its scratch space");
  } catch (const std::exception& e) {
    return Status(Code::runtime, std::string(op) + ": " + e.what());
  }
}

// Runs fn(i) for all i < count, on this thread or on the pool. Results do not depend on which.
template <class Fn>
void for_tasks(int64_t count, bool threaded, const Fn& fn) {
  if (threaded && count > 1) {
    parallel_for(count, fn);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      if (i > 0) poll();
      fn(i);
    }
  }
}

// Adds the rows of x [rows, cols] to acc in ascending order; rows are `ld` elements apart.
inline void sum_rows_into(float* acc, DType dtype, const char* x, int64_t ld, int64_t rows, int64_t cols) {
  constexpr int64_t kRows = 1 << 14;  // about a millisecond of work
  for (int64_t r = 0; r < rows; r += kRows) {
    if (r > 0) poll();
    kernels().column_sum(dtype, x + r * ld * bytes(dtype), ld, std::min(kRows, rows - r), cols, acc);
  }
}

inline constexpr int64_t kThreadedElements = 1 << 16;  // below this, waking a thread costs more than it saves

}  // namespace diptych::cpu
