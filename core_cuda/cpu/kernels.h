// The CPU kernels that registry.cpp names. Arguments arrive checked.
#pragma once

#include "diptych/grouped.h"
#include "diptych/ops.h"

namespace diptych::cpu {

#define OP(name, Args, ...) Status name(const Args&, const Execution&);
#include "diptych/ops.def"
Status quantize_two_level(const QuantizeArgs&, const Execution&);

const char* isa();               // the instruction set in use: "avx512", "avx2" or "generic"
bool set_isa(const char* name);  // for tests: every set gives the same bits; false where this machine lacks it

}  // namespace diptych::cpu
