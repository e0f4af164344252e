// The state of statistics on the CPU, for elements that float32 represents exactly.
#pragma once

#include <cstdint>

#include "diptych/statistics.h"

namespace diptych::cpu {

// Of the rows of a part so far. `largest`: the bits of the largest finite magnitude.
struct LaneMoments {
  alignas(64) double sum[kSumLanes], squares[kSumLanes];
  int32_t largest;
  int64_t zero, nan, infinite, subnormal;
};

}  // namespace diptych::cpu
