// The CPU kernels that registry.cpp names. Arguments arrive checked.
#pragma once

#include "diptych/ops.h"

namespace diptych::cpu {

Status amax(const AmaxArgs&, const Execution&);
Status quantize(const QuantizeArgs&, const Execution&);
Status dequantize(const DequantizeArgs&, const Execution&);
Status gemm(const GemmArgs&, const Execution&);
Status bias_grad(const BiasGradArgs&, const Execution&);

const char* isa();               // the instruction set in use: "avx512", "avx2" or "generic"
bool set_isa(const char* name);  // for tests: every set gives the same bits; false where this machine lacks it

}  // namespace diptych::cpu
