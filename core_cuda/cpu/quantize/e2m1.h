// Reading E2M1. Every E2M1 value is an E4M3 value too, so that unpacked payloads go through the kernels of E4M3.
// Included only by avx2.cpp, avx512.cpp and generic.cpp, inside their target region.
#pragma once

#include "cpu/isa/simd.h"

namespace diptych::cpu {
inline namespace DIPTYCH_ISA {

using NibbleBytes = uint8_t __attribute__((vector_size(16)));

// E2M1 code (the high bits are zero) -> the E4M3 code of the same value, -0 included
DIPTYCH_INLINE NibbleBytes e4m3_of_e2m1(NibbleBytes code) {
  const NibbleBytes a = code & 7;
  const NibbleBytes half = a > 0 ? NibbleBytes{} + 0x30 : NibbleBytes{};  // 0.5, the only subnormal
  return (a > 1 ? (a << 2) + 0x30 : half) | ((code & 8) << 4);
}

// Unpacks elements 0 .. n - 1, two in a byte with the even one in the low nibble, to E4M3 codes; n is even.
inline void unpack(const uint8_t* src, int64_t n, uint8_t* dst) {
  const auto run = [&](int64_t count) DIPTYCH_LAMBDA {
    NibbleBytes packed{};
    __builtin_memcpy(&packed, src, count / 2);
    const NibbleBytes lo = e4m3_of_e2m1(packed & 15), hi = e4m3_of_e2m1(packed >> 4);
    const NibbleBytes turned[2] = {
        __builtin_shufflevector(lo, hi, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
        __builtin_shufflevector(lo, hi, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)};
    __builtin_memcpy(dst, turned, count);
  };
  for (; n >= 32; n -= 32, src += 16, dst += 32) run(32);
  if (n > 0) run(n);
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych::cpu
