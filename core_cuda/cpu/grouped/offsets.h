// The CPU's check of group offsets, whose values it can read.
#pragma once

#include <string>

#include "diptych/status.h"
#include "diptych/tensor.h"

namespace diptych::cpu {

inline Status check_offsets(const char* op, const TensorView& offsets, int64_t rows, int32_t align = 1) {
  const int32_t* at = offsets.as<const int32_t>();
  for (int64_t i = 0; i < offsets.numel(); ++i) {
    const auto refuse = [&](const std::string& why) {
      return Status(Code::value,
                    std::string(op) + ": offsets[" + std::to_string(i) + "] = " + std::to_string(at[i]) + why);
    };
    if (at[i] < 0 || at[i] > rows) return refuse(" lies outside of the tensor's " + std::to_string(rows) + " rows");
    if (i > 0 && at[i] < at[i - 1]) return refuse(" is less than the one before it, " + std::to_string(at[i - 1]));
    if (at[i] % align != 0) return refuse(" is no multiple of align, " + std::to_string(align));
  }
  return {};
}

}  // namespace diptych::cpu
