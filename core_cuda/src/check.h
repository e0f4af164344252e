// What every op asks of its arguments before any kernel starts.
#pragma once

#include <string>

#include "diptych/grouped.h"
#include "diptych/ops.h"

namespace diptych {

Status check(const AmaxArgs&, const Device&);
Status check(const QuantizeArgs&, const Device&);
Status check(const LogAmaxArgs&, const Device&);
Status check(const ScaleUpdateArgs&, const Device&);
Status check(const DequantizeArgs&, const Device&);
Status check(const GemmArgs&, const Device&);
Status check(const BiasGradArgs&, const Device&);
Status check(const NormArgs&, const Device&);
Status check(const NormGradArgs&, const Device&);
Status check(const ActivationArgs&, const Device&);
Status check(const ActivationGradArgs&, const Device&);
Status check(const PermuteMapArgs&, const Device&);
Status check(const ChunkMapArgs&, const Device&);
Status check(const InvertMapArgs&, const Device&);
Status check(const PermuteArgs&, const Device&);
Status check(const PermuteColumnsArgs&, const Device&);
Status check(const UnpermuteArgs&, const Device&);
Status check(const UnpermuteGradArgs&, const Device&);
Status check(const GroupedGemmArgs&, const Device&);
Status check(const GroupedBiasGradArgs&, const Device&);

std::string describe(const TensorView&);  // "float32[4, 8] on cpu"

// Extents of a gemm operand: `kept` rows or columns of D, `reduced` along k.
struct Extents {
  int64_t kept, reduced;
};
Extents extents(const QuantizedView&);

}  // namespace diptych
