// Stands in for cuda/quantize/dither.cuh, whose conversions are instructions: the formula of NUMERICS 5 as it stands.
#pragma once

#include "cuda/base/e2m1.cuh"
#include "cuda/quantize/philox.cuh"

namespace diptych::cuda {

template <typename Magnitude>
uint32_t e2m1_dithered8(uint2 signs, uint32_t r0, uint32_t r1, Magnitude&& magnitude) {
  constexpr float kValues[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  uint32_t word = 0;
  for (int j = 0; j < 8; ++j) {
    const uint32_t byte = (j < 4 ? r0 : r1) >> (j % 4 * 8) & 255;
    const uint32_t negative = (j % 2 ? signs.y : signs.x) >> (j / 2 * 8 + 7) & 1;
    const float a = magnitude(j), step = a >= 4.0f ? 2.0f : a >= 2.0f ? 1.0f : 0.5f;
    const float u = (static_cast<float>(byte) + 0.5f) / 256.0f, t = std::min(a + u * step, 6.0f);
    uint32_t code = 7;  // of NaN, too
    while (kValues[code] > t) --code;
    word |= (code | negative << 3) << (4 * j);
  }
  return word;
}

}  // namespace diptych::cuda
