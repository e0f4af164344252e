// Ctrl-C during an op: the main thread runs Python's signal handlers now and then and stops the op if one raises.
#pragma once

#include "cpu/base/interrupt.h"

namespace diptych::bind {

// Records which thread is the main one. Called once, with the GIL, while the module is imported.
void find_main_thread();

// Returns the function that ops of this thread call, without the GIL, to check whether to stop. If it returns true, a
// Python exception is set. Null on every thread but the main one, since only the main thread runs signal handlers.
cpu::Interruptible::Ask signals_of_this_thread();

}  // namespace diptych::bind
