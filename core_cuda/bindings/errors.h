// How the core's errors and warnings become Python's.
#pragma once

#include <string>

#include "diptych/status.h"
#include "diptych/warn.h"

namespace diptych::bind {

// Raises an exception of diptych.common.errors, by its name there.
[[noreturn]] void raise(const char* error, const std::string& message);

// Issues the warnings as EmulationWarnings, then raises the Python exception of the status's code.
void finish(const Status& status, const WarningCollector& warnings);

}  // namespace diptych::bind
