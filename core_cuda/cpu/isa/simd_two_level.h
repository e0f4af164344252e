// The inner loops of two-level quantization for one instruction set (NUMERICS 5). Blocks are 16 elements.
#pragma once

#include "cpu/isa/isa.h"
#include "cpu/isa/simd.h"
#include "cpu/quantize/philox.h"

namespace diptych::cpu {
inline namespace DIPTYCH_ISA {

constexpr int kBlock = 16, kBlockVectors = kBlock / kLanes;

// Magnitudes are compared as integers, in which infinity and NaN are larger than any number, so a peak shows them.
DIPTYCH_INLINE VI larger(VI a, VI b) { return a > b ? a : b; }
template <DType D>
DIPTYCH_INLINE VI magnitude(const void* x, int64_t i, auto lanes) {
  return bits_as<VI>(load<D>(x, i, lanes)) & 0x7FFFFFFF;
}

// Lane i of the result is the largest lane of m[i].
template <int N>
DIPTYCH_INLINE VI largest_of_each(VI (&m)[N]) {
  if constexpr (N == 1) {
    return m[0];
  } else {
    VI half[N / 2];
    for (int i = 0; i < N / 2; ++i) {
      const VF a = bits_as<VF>(m[2 * i]), b = bits_as<VF>(m[2 * i + 1]);
      half[i] = larger(bits_as<VI>(every_other<0>(a, b)), bits_as<VI>(every_other<1>(a, b)));
    }
    return largest_of_each(half);
  }
}

template <DType D>
DIPTYCH_INLINE VI block_magnitude(const void* x, int64_t block) {
  VI m = magnitude<D>(x, block * kBlock, AllLanes{});
  for (int v = 1; v < kBlockVectors; ++v) m = larger(m, magnitude<D>(x, block * kBlock + v * kLanes, AllLanes{}));
  return m;
}

inline void row_peaks(DType dtype, const void* x, int64_t n, float* out) {
  with_dtype(dtype, [&]<DType D>() DIPTYCH_LAMBDA {
    const int64_t blocks = n / kBlock;
    int64_t b = 0;
    for (; b + kLanes <= blocks; b += kLanes) {
      VI m[kLanes];
      for (int j = 0; j < kLanes; ++j) m[j] = block_magnitude<D>(x, b + j);
      put(out + b, largest_of_each(m), AllLanes{});
    }
    if (b == blocks) return;
    VI m[kLanes] = {};
    for (int j = 0; b + j < blocks; ++j) m[j] = block_magnitude<D>(x, b + j);
    put(out + b, largest_of_each(m), blocks - b);
  });
}

inline void column_peaks(DType dtype, const void* x, int64_t ld, int64_t cols, float* out) {
  with_dtype(dtype, [&]<DType D>() DIPTYCH_LAMBDA {
    for (int64_t c = 0; c < cols; c += kLanes) {  // whole vectors: cols is a multiple of a block
      VI m = magnitude<D>(x, c, AllLanes{});
      for (int r = 1; r < kBlock; ++r) m = larger(m, magnitude<D>(x, r * ld + c, AllLanes{}));
      put(out + c, m, AllLanes{});
    }
  });
}

// A peak that is infinite or NaN gives code 0x7F and a NaN as multiplier, which turns the whole block into NaN and then
// into code 7.
inline void two_level_scales(const Level& level, const float* peaks, int64_t n, float* multiplier, uint8_t* code) {
  constexpr float kMax = row(DType::f32).max;
  sweep(n, [&](int64_t i, auto lanes) DIPTYCH_LAMBDA {
    const VF peak = load<DType::f32>(peaks, i, lanes);
    const VI c = encode<E4M3, VI>(unless_infinite(peak, peak * level.up));  // saturates by itself
    const VF m = 1.0f / (decode<E4M3, VF>(c) * level.down);
    put(multiplier + i, m > kMax ? splat(kMax) : m, lanes);
    put(code + i, narrow_byte(c), lanes);
  });
}

template <int n>
struct Nibbles;
template <>
struct Nibbles<16> {
  using Pairs = uint16_t __attribute__((vector_size(16)));
  using Packed = uint8_t __attribute__((vector_size(8)));
};
#if DIPTYCH_LANES > 4
template <>
struct Nibbles<4 * kLanes> {
  using Pairs = uint16_t __attribute__((vector_size(4 * kLanes)));
  using Packed = uint8_t __attribute__((vector_size(2 * kLanes)));
};
#endif

// Codes, one a byte -> two a byte
template <int n>
DIPTYCH_INLINE void put_nibbles(uint8_t* out, const uint8_t (&codes)[n]) {
  const auto p = load_as<typename Nibbles<n>::Pairs>(codes);
  const auto packed = __builtin_convertvector((p | (p >> 4)) & 0xFF, typename Nibbles<n>::Packed);
  __builtin_memcpy(out, &packed, sizeof(packed));
}

template <DType D, bool drawn>
DIPTYCH_INLINE void encode_blocks(const void* x, const float* multiplier, int64_t n, const Draws* draws, uint8_t* out) {
  alignas(64) uint8_t random[kBlock * kLanes];
  const auto code = [&](int64_t base, int64_t i) DIPTYCH_LAMBDA {
    const VF v = load<D>(x, base + i, AllLanes{}) * splat(multiplier[(base + i) / kBlock]);
    if constexpr (drawn) return encode_e2m1_after<VI>(v, fraction(load_bytes(random + i, AllLanes{})));
    return encode<E2M1, VI>(v);
  };
  for (int64_t base = 0; base < n; base += kBlock * kLanes) {
    if constexpr (drawn) draw_bytes(*draws, draws->first + base / kBlock, random);
    const int64_t part = n - base < kBlock * kLanes ? n - base : kBlock * kLanes;
    int64_t i = 0;
    for (; i + 4 * kLanes <= part; i += 4 * kLanes) {
      alignas(64) uint8_t codes[4 * kLanes];
      put_bytes(codes, code(base, i), code(base, i + kLanes), code(base, i + 2 * kLanes), code(base, i + 3 * kLanes));
      put_nibbles(out + (base + i) / 2, codes);
    }
    for (; i < part; i += kBlock) {
      uint8_t codes[kBlock];
      for (int v = 0; v < kBlock; v += kLanes) put(codes + v, narrow_byte(code(base, i + v)), AllLanes{});
      put_nibbles(out + (base + i) / 2, codes);
    }
  }
}

inline void encode_rows(DType dtype, const void* x, const float* multiplier, int64_t n, const Draws* draws,
                        uint8_t* out) {
  with_dtype(dtype, [&]<DType D>() DIPTYCH_LAMBDA {
    if (draws) {
      encode_blocks<D, true>(x, multiplier, n, draws, out);
    } else {
      encode_blocks<D, false>(x, multiplier, n, draws, out);
    }
  });
}

template <DType D, bool drawn>
DIPTYCH_INLINE void encode_down(const void* x, int64_t ld, int64_t cols, const float* multiplier, const Draws* draws,
                                uint64_t* out, int64_t ld_out) {
  for (int64_t c = 0; c < cols; c += kLanes) {
    const VF by = load<DType::f32>(multiplier, c, AllLanes{});
    VU random[4];
    if constexpr (drawn) draw(*draws, draws->first + c * draws->step, random);
    VI word[2] = {};  // eight codes of each column
    for (int r = 0; r < kBlock; ++r) {
      const VF v = load<D>(x, r * ld + c, AllLanes{}) * by;
      VI code;
      if constexpr (drawn) {
        code = encode_e2m1_after<VI>(v, fraction((VI)((random[r / 4] >> (r % 4 * 8)) & 0xFF)));
      } else {
        code = encode<E2M1, VI>(v);
      }
      word[r / 8] |= code << (r % 8 * 4);
    }
    const VU pairs[2] = {zip<0>((VU)word[0], (VU)word[1]), zip<1>((VU)word[0], (VU)word[1])};
    uint64_t each[kLanes];
    __builtin_memcpy(each, pairs, sizeof(each));
    for (int i = 0; i < kLanes; ++i) out[(c + i) * ld_out] = each[i];
  }
}

inline void encode_columns(DType dtype, const void* x, int64_t ld, int64_t cols, const float* multiplier,
                           const Draws* draws, uint64_t* out, int64_t ld_out) {
  with_dtype(dtype, [&]<DType D>() DIPTYCH_LAMBDA {
    if (draws) {
      encode_down<D, true>(x, ld, cols, multiplier, draws, out, ld_out);
    } else {
      encode_down<D, false>(x, ld, cols, multiplier, draws, out, ld_out);
    }
  });
}

inline void rotate(const void* x, int64_t ld, int64_t cols, bool signs, float* out, int64_t ld_out) {
  constexpr int kSign[kBlock] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
  sweep(cols, [&](int64_t c, auto lanes) DIPTYCH_LAMBDA {
    VF z[kBlock];
    for (int r = 0; r < kBlock; ++r)
      z[r] = load<DType::bf16>(x, r * ld + c, lanes) * (signs && kSign[r] < 0 ? -0.25f : 0.25f);
    for (int h = 1; h < kBlock; h *= 2)
      for (int r = 0; r < kBlock; ++r)
        if ((r & h) == 0) {
          const VF a = z[r], b = z[r + h];
          z[r] = a + b;
          z[r + h] = a - b;
        }
    for (int r = 0; r < kBlock; ++r) put(out + r * ld_out + c, from_bf16<VF>(to_bf16<VI>(z[r])), lanes);
  });
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych::cpu
