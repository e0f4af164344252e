// The CPU kernels that registry.cpp names. Arguments arrive checked.
#pragma once

#include "diptych/grouped.h"
#include "diptych/ops.h"

namespace diptych::cpu {

Status amax(const AmaxArgs&, const Execution&);
Status quantize(const QuantizeArgs&, const Execution&);
Status quantize_two_level(const QuantizeArgs&, const Execution&);
Status log_amax(const LogAmaxArgs&, const Execution&);
Status scale_update(const ScaleUpdateArgs&, const Execution&);
Status dequantize(const DequantizeArgs&, const Execution&);
Status gemm(const GemmArgs&, const Execution&);
Status bias_grad(const BiasGradArgs&, const Execution&);
Status norm(const NormArgs&, const Execution&);
Status norm_grad(const NormGradArgs&, const Execution&);
Status activation(const ActivationArgs&, const Execution&);
Status activation_grad(const ActivationGradArgs&, const Execution&);
Status permute_map(const PermuteMapArgs&, const Execution&);
Status chunk_map(const ChunkMapArgs&, const Execution&);
Status invert_map(const InvertMapArgs&, const Execution&);
Status permute(const PermuteArgs&, const Execution&);
Status permute_columns(const PermuteColumnsArgs&, const Execution&);
Status unpermute(const UnpermuteArgs&, const Execution&);
Status unpermute_grad(const UnpermuteGradArgs&, const Execution&);
Status grouped_gemm(const GroupedGemmArgs&, const Execution&);
Status grouped_bias_grad(const GroupedBiasGradArgs&, const Execution&);

const char* isa();               // the instruction set in use: "avx512", "avx2" or "generic"
bool set_isa(const char* name);  // for tests: every set gives the same bits; false where this machine lacks it

}  // namespace diptych::cpu
