// The inner loops of gemm for one instruction set (NUMERICS 7).
#pragma once

#include "cpu/isa/isa.h"
#include "cpu/isa/simd.h"
#include "cpu/isa/simd_quantize.h"

namespace diptych::cpu {
inline namespace DIPTYCH_ISA {

// The accumulators, one row of B and a broadcast element of A must fit the registers.
constexpr int kRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;
constexpr int kVectors = 2;
constexpr int kCols = kVectors * kLanes;
constexpr int kWidthA = (kRows + kLanes - 1) / kLanes * kLanes;

inline void pack(DType element, const uint8_t* src, int64_t ld, bool k_major, int64_t outer, int64_t k, int width,
                 float* dst) {
  constexpr int kMost = 32;  // limit of a panel's width
  static_assert(kCols <= kMost && kWidthA <= kMost);
  with_element(element, [&]<class E>() DIPTYCH_LAMBDA {
    if (k_major) {
      for (int64_t i = 0; i < k; ++i, dst += width) {
        for (int64_t j = 0; j < width; j += kLanes) {
          const int64_t left = outer - j;
          const uint8_t* p = src + i * ld + j;
          const VI codes = left >= kLanes ? load_bytes(p, AllLanes{}) : left > 0 ? load_bytes(p, left) : VI{};
          put(dst + j, decode<E, VF>(codes), AllLanes{});
        }
      }
    } else {
      alignas(64) uint8_t turned[16][kMost] = {};
      for (int64_t i = 0; i < k; i += 16) {
        const int64_t depth = k - i < 16 ? k - i : 16;
        for (int64_t j = 0; j < outer; j += 16)
          transpose_16(src + j * ld + i, ld, outer - j < 16 ? outer - j : 16, depth, &turned[0][j], kMost);
        for (int64_t d = 0; d < depth; ++d, dst += width)
          for (int64_t j = 0; j < width; j += kLanes)
            put(dst + j, decode<E, VF>(load_bytes(&turned[d][j], AllLanes{})), AllLanes{});
      }
    }
  });
}

template <int R>
struct Tile {
  VF p[R][kVectors];

  DIPTYCH_INLINE void clear() {
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) p[i][j] = VF{};
  }
  DIPTYCH_INLINE void read(const float* from) {
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) p[i][j] = load_as<VF>(from + i * kCols + j * kLanes);
  }
  DIPTYCH_INLINE void write(float* to) const {
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) put(to + i * kCols + j * kLanes, p[i][j], AllLanes{});
  }
  DIPTYCH_INLINE void accumulate(const float* a, const float* b, int64_t k) {
    for (; k > 0; --k, a += kWidthA, b += kCols) {
      VF row[kVectors];
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) row[j] = load_as<VF>(b + j * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        const VF by = splat(a[i]);
#pragma GCC unroll 16
        for (int j = 0; j < kVectors; ++j) p[i][j] = fma(by, row[j], p[i][j]);
      }
    }
  }
  DIPTYCH_INLINE void add_scaled(const float* sa, const float* sb, float* acc) const {
    VF s[kVectors];
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) s[j] = load_as<VF>(sb + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) {
        float* to = acc + i * kCols + j * kLanes;
        put(to, load_as<VF>(to) + p[i][j] * (splat(sa[i]) * s[j]), AllLanes{});
      }
  }
};

template <int R>
inline void tile_whole(const float* a, const float* b, int64_t k, float* p) {
  Tile<R> t;
  t.read(p);
  t.accumulate(a, b, k);
  t.write(p);
}

template <int R>
inline void tile_in_blocks(const float* a, const float* b, int64_t k, int64_t k_block, const float* sa, const float* sb,
                           float* acc) {
  for (; k > 0; k -= k_block, sa += kWidthA, sb += kCols) {
    const int64_t depth = k < k_block ? k : k_block;
    Tile<R> t;
    t.clear();
    t.accumulate(a, b, depth);
    t.add_scaled(sa, sb, acc);
    a += depth * kWidthA;
    b += depth * kCols;
  }
}

// Calls f.template operator()<R>() for the smallest compiled R >= rows; rows past the operand are zeros.
template <class Fn>
DIPTYCH_INLINE void with_rows(int rows, Fn f) {
  if (rows <= 1) {
    f.template operator()<1>();
  } else if (kRows > 6 && rows <= 4) {
    f.template operator()<4>();
  } else if (kRows > 8 && rows <= 8) {
    f.template operator()<8>();
  } else {
    f.template operator()<kRows>();
  }
}

inline void tile(int rows, const float* a, const float* b, int64_t k, float* p) {
  with_rows(rows, [&]<int R>() DIPTYCH_LAMBDA { tile_whole<R>(a, b, k, p); });
}

inline void tile_blocked(int rows, const float* a, const float* b, int64_t k, int64_t k_block, const float* sa,
                         const float* sb, float* acc) {
  with_rows(rows, [&]<int R>() DIPTYCH_LAMBDA { tile_in_blocks<R>(a, b, k, k_block, sa, sb, acc); });
}

inline void epilogue(const Epilogue& e, const float* acc, int64_t n) {
  with_dtype(e.dtype, [&]<DType D>() DIPTYCH_LAMBDA {
    sweep(n, [&](int64_t i, auto lanes) DIPTYCH_LAMBDA {
      VF r = load<DType::f32>(acc, i, lanes);
      if (e.sb) r = 0.0f + r * (e.sa * load<DType::f32>(e.sb, i, lanes));
      r = e.amax ? (e.alpha * load<DType::f32>(e.amax, i, lanes)) * e.unit * r : e.alpha * r;
      if (e.bias) r = r + load<DType::f32>(e.bias, i, lanes);
      if (e.c) r = r + e.beta * load<D>(e.c, i, lanes);
      store<D>(e.d, i, r, lanes);
    });
  });
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych::cpu
