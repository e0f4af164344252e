// The inner loop of hash for one instruction set (NUMERICS 10).
#pragma once

#include "cpu/hash/hash.h"
#include "cpu/isa/simd.h"

namespace diptych::cpu {
inline namespace DIPTYCH_ISA {

using VU = uint32_t __attribute__((vector_size(4 * kLanes)));
using VUH = uint16_t __attribute__((vector_size(4 * kLanes)));
using V64 = uint64_t __attribute__((vector_size(4 * kLanes)));

struct HashKeys {
  alignas(64) uint32_t lane[2][kHashWords];
};
inline constexpr HashKeys kHashKeys = [] {
  HashKeys keys = {};
  for (int i = 0; i < kHashWords; ++i) {
    keys.lane[0][i] = static_cast<uint32_t>(split_mix(i));
    keys.lane[1][i] = static_cast<uint32_t>(split_mix(i) >> 32);
  }
  return keys;
}();

// Returns the product of each even word with the odd one above it.
DIPTYCH_INLINE V64 pair_products(VU u) {
  const V64 pairs = (V64)u;
#if DIPTYCH_LANES == 16 && defined(__x86_64__)
  return (V64)_mm512_mul_epu32((__m512i)pairs, (__m512i)(pairs >> 32));
#elif DIPTYCH_LANES == 8 && defined(__x86_64__)
  return (V64)_mm256_mul_epu32((__m256i)pairs, (__m256i)(pairs >> 32));
#else
  return (pairs & 0xFFFFFFFF) * (pairs >> 32);
#endif
}

// Exchanges the halves of each word.
DIPTYCH_INLINE VU swap_halves(VU w) {
  return [&]<int... i>(std::integer_sequence<int, i...>) DIPTYCH_LAMBDA {
    return (VU)__builtin_shufflevector((VUH)w, (VUH)w, (i ^ 1)...);
  }(std::make_integer_sequence<int, 2 * kLanes>{});
}

// Adds blocks first .. first + count - 1, which begin at x, to the sums of both lanes.
//
// v is u without its 2^32. u0 u1 is v0 v1 + 2^32 (v0 + v1) modulo 2^64, and `words` has the sums of v.
inline void hash_blocks(const uint8_t* x, int64_t first, int64_t count, uint64_t* sums) {
  for (int64_t b = first; b < first + count; ++b, x += kHashBlock) {
    V64 products[2] = {};
    VU words[2] = {};
#pragma GCC unroll 4
    for (int i = 0; i < kHashWords; i += kLanes) {
      const VU w = load_as<VU>(x + 4 * i);
      const VU v[2] = {w + load_as<VU>(&kHashKeys.lane[0][i]), swap_halves(w) + load_as<VU>(&kHashKeys.lane[1][i])};
      for (int lane = 0; lane < 2; ++lane) products[lane] += pair_products(v[lane]), words[lane] += v[lane];
    }
    for (int lane = 0; lane < 2; ++lane) {
      const V64 pairs = (V64)words[lane], all = products[lane] + (pairs << 32) + (pairs >> 32 << 32);
      uint64_t block = 0;
      for (int i = 0; i < kLanes / 2; ++i) block += all[i];
      sums[lane] += block_factor(b, lane) * block;
    }
  }
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych::cpu
