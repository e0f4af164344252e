// The CPU kernels that registry.cpp names, beside those that have an op's name. Arguments arrive checked.
#pragma once

#include "diptych/quantize.h"

namespace diptych::cpu {

Status quantize_two_level(const QuantizeArgs&, const Execution&);

const char* isa();               // the instruction set in use: "avx512", "avx2" or "generic"
bool set_isa(const char* name);  // for tests: every set gives the same bits; false where this machine lacks it

}  // namespace diptych::cpu
