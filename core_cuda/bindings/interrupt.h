// Ctrl-C during an op: the main thread asks Python now and then whether a signal's handler has raised.
#pragma once

#include "cpu/base/interrupt.h"

namespace diptych::bind {

// Called once, with the GIL, while the module is imported.
void find_main_thread();

// What an op that this thread calls without the GIL should ask. Where it says stop, a Python exception is set. Null on
// all threads but the main one, which alone runs signal handlers.
cpu::Interruptible::Ask signals_of_this_thread();

}  // namespace diptych::bind
