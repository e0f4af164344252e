// Philox4x32-10 over lanes: the random bytes of stochastic rounding (NUMERICS 5).
// Included only by avx2.cpp, avx512.cpp and generic.cpp, inside their target region.
#pragma once

#include "cpu/isa/isa.h"
#include "cpu/isa/simd.h"

namespace diptych::cpu {
inline namespace DIPTYCH_ISA {

using VU = uint32_t __attribute__((vector_size(4 * kLanes)));
using VL = uint64_t __attribute__((vector_size(4 * kLanes)));

// Returns the low 32 bits of each 64-bit lane of a, times b.
DIPTYCH_INLINE VL multiply_even(VL a, uint32_t b) {
#if DIPTYCH_LANES == 16 && defined(__x86_64__)
  return (VL)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif DIPTYCH_LANES == 8 && defined(__x86_64__)
  return (VL)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
  return (a & 0xFFFFFFFFu) * b;
#endif
}

DIPTYCH_INLINE void multiply(VU a, uint32_t b, VU& high, VU& low) {
  const VL even = multiply_even((VL)a, b), odd = multiply_even((VL)a >> 32, b);
  high = (VU)((even >> 32) | (odd & ~uint64_t{0xFFFFFFFF}));
  low = (VU)((even & 0xFFFFFFFF) | (odd << 32));
}

// Draws the four words of block first + i * step into lane i of w[0..3].
DIPTYCH_INLINE void draw(const Draws& d, uint64_t first, VU (&w)[4]) {
  VU c0, c1;
  for (int i = 0; i < kLanes; ++i, first += d.step) {
    c0[i] = static_cast<uint32_t>(first);
    c1[i] = static_cast<uint32_t>(first >> 32);
  }
  VU c2 = VU{} + static_cast<uint32_t>(d.offset), c3 = VU{} + static_cast<uint32_t>(d.offset >> 32);
  uint32_t k0 = d.key[0], k1 = d.key[1];
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
    VU h0, l0, h1, l1;
    multiply(c0, 0xD2511F53, h0, l0);
    multiply(c2, 0xCD9E8D57, h1, l1);
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
  }
  w[0] = c0;
  w[1] = c1;
  w[2] = c2;
  w[3] = c3;
}

// Returns the lower (upper) halves of a and b interleaved.
template <int upper>
DIPTYCH_INLINE VU zip(VU a, VU b) {
  return [&]<int... i>(std::integer_sequence<int, i...>) DIPTYCH_LAMBDA {
    return __builtin_shufflevector(a, b, (i / 2 + i % 2 * kLanes + upper * kLanes / 2)...);
  }(std::make_integer_sequence<int, kLanes>{});
}

// Draws bytes in the order of the elements that they round: 16 for each of kLanes blocks.
DIPTYCH_INLINE void draw_bytes(const Draws& d, uint64_t first, uint8_t* out) {
  VU w[4];
  draw(d, first, w);
  const VU a = zip<0>(w[0], w[2]), b = zip<0>(w[1], w[3]), c = zip<1>(w[0], w[2]), e = zip<1>(w[1], w[3]);
  const VU ordered[4] = {zip<0>(a, b), zip<1>(a, b), zip<0>(c, e), zip<1>(c, e)};
  __builtin_memcpy(out, ordered, sizeof(ordered));
}

// A random byte -> the part of a step that is added, (r + 1/2) / 256
DIPTYCH_INLINE VF fraction(VI byte) { return to_float<VF>(byte) * pow2f(-8) + pow2f(-9); }

}  // namespace DIPTYCH_ISA
}  // namespace diptych::cpu
