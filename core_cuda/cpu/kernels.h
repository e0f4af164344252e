// The CPU kernels that registry.cpp names. Arguments arrive checked.
#pragma once

#include "diptych/ops.h"

namespace diptych::cpu {

Status amax(const AmaxArgs&, const Execution&);
Status quantize(const QuantizeArgs&, const Execution&);
Status quantize_two_level(const QuantizeArgs&, const Execution&);
Status scale_update(const ScaleUpdateArgs&, const Execution&);
Status dequantize(const DequantizeArgs&, const Execution&);
Status gemm(const GemmArgs&, const Execution&);
Status bias_grad(const BiasGradArgs&, const Execution&);
Status norm(const NormArgs&, const Execution&);
Status norm_grad(const NormGradArgs&, const Execution&);
Status activation(const ActivationArgs&, const Execution&);
Status activation_grad(const ActivationGradArgs&, const Execution&);

const char* isa();               // the instruction set in use: "avx512", "avx2" or "generic"
bool set_isa(const char* name);  // for tests: every set gives the same bits; false where this machine lacks it

}  // namespace diptych::cpu
