// The numbers of hash (NUMERICS 10).
#pragma once

#include <cstdint>

#include "cpu/quantize/codec.h"

namespace diptych::cpu {
inline namespace DIPTYCH_ISA {

constexpr int kHashWords = 256;             // of a block
constexpr int kHashBlock = 4 * kHashWords;  // bytes
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

DIPTYCH_INLINE constexpr uint64_t mix(uint64_t z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}
// Output n of SplitMix64 from seed 0.
DIPTYCH_INLINE constexpr uint64_t split_mix(uint64_t n) { return mix((n + 1) * kGolden); }
// What block b is multiplied with.
DIPTYCH_INLINE constexpr uint64_t block_factor(int64_t b, int lane) {
  return split_mix(kHashWords + 2 * static_cast<uint64_t>(b) + lane) | 1;
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych::cpu
