// Vectors of DIPTYCH_LANES float32, written with the compiler's vector types, and with intrinsics only where those are
// not enough. Included only by avx2.cpp, avx512.cpp and generic.cpp, inside their target region.
#pragma once

#include <utility>

#include "cpu/quantize/codec.h"
#include "diptych/dtype.h"

#define DIPTYCH_LAMBDA __attribute__((always_inline))

namespace diptych::cpu {
inline namespace DIPTYCH_ISA {

constexpr int kLanes = DIPTYCH_LANES;
using VF = float __attribute__((vector_size(4 * kLanes)));
using VI = int32_t __attribute__((vector_size(4 * kLanes)));
using VH = uint16_t __attribute__((vector_size(2 * kLanes)));
using VB = uint8_t __attribute__((vector_size(kLanes)));

struct AllLanes {  // the lane count of a full vector, a compile-time constant
  constexpr operator int64_t() const { return kLanes; }
};

// Calls body(first, lanes) over [0, n): for full vectors, then for a partial one.
template <class Body>
DIPTYCH_INLINE void sweep(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, AllLanes{});
  if (i < n) body(i, n - i);
}

template <class V>
DIPTYCH_INLINE V load_as(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

DIPTYCH_INLINE VF splat(float v) { return v - VF{}; }  // - and not +, so that -0 stays -0
DIPTYCH_INLINE VF abs(VF x) { return bits_as<VF>(bits_as<VI>(x) & 0x7FFFFFFF); }

// Returns the even (odd) lanes of a, then those of b.
template <int odd>
DIPTYCH_INLINE VF every_other(VF a, VF b) {
  return [&]<int... i>(std::integer_sequence<int, i...>) DIPTYCH_LAMBDA {
    return __builtin_shufflevector(a, b, (2 * i + odd)...);
  }(std::make_integer_sequence<int, kLanes>{});
}

#if DIPTYCH_LANES == 16 && defined(__x86_64__)
DIPTYCH_INLINE VF max_skip_nan(VF x, VF acc) { return (VF)_mm512_max_ps((__m512)x, (__m512)acc); }  // NaN x: acc
DIPTYCH_INLINE VF max_abs_skip_nan(VF x, VF acc) {  // no signalling NaN, and acc >= 0
  return (VF)_mm512_range_ps((__m512)x, (__m512)acc, 0b1011);
}
DIPTYCH_INLINE VF fma(VF a, VF b, VF c) { return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
DIPTYCH_INLINE VF half_to_float(VH h) { return (VF)_mm512_cvtph_ps((__m256i)h); }
DIPTYCH_INLINE VH float_to_half(VF x) {
  return (VH)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
DIPTYCH_INLINE VI widen(VH h) { return (VI)_mm512_cvtepu16_epi32((__m256i)h); }
DIPTYCH_INLINE VI widen(VB b) { return (VI)_mm512_cvtepu8_epi32((__m128i)b); }
DIPTYCH_INLINE VH narrow_half(VI v) { return (VH)_mm512_cvtepi32_epi16((__m512i)v); }
DIPTYCH_INLINE VB narrow_byte(VI v) { return (VB)_mm512_cvtepi32_epi8((__m512i)v); }
DIPTYCH_INLINE void put_bytes(uint8_t* p, VI a, VI b, VI c, VI d) {
  const __m512i ab = _mm512_packus_epi32((__m512i)a, (__m512i)b), cd = _mm512_packus_epi32((__m512i)c, (__m512i)d);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(ab, cd)));
}
DIPTYCH_INLINE float max_of_lanes(VF v) { return _mm512_reduce_max_ps((__m512)v); }
#elif DIPTYCH_LANES == 8 && defined(__x86_64__)
DIPTYCH_INLINE VF max_skip_nan(VF x, VF acc) { return (VF)_mm256_max_ps((__m256)x, (__m256)acc); }
DIPTYCH_INLINE VF max_abs_skip_nan(VF x, VF acc) { return max_skip_nan(abs(x), acc); }
DIPTYCH_INLINE VF fma(VF a, VF b, VF c) { return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
DIPTYCH_INLINE VF half_to_float(VH h) { return (VF)_mm256_cvtph_ps((__m128i)h); }
DIPTYCH_INLINE VH float_to_half(VF x) {
  return (VH)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
DIPTYCH_INLINE VI widen(VH h) { return (VI)_mm256_cvtepu16_epi32((__m128i)h); }
DIPTYCH_INLINE VI widen(VB b) { return (VI)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(__builtin_bit_cast(long long, b))); }
DIPTYCH_INLINE VH narrow_half(VI v) {
  const __m256i w = (__m256i)v;
  return (VH)_mm_packus_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
}
DIPTYCH_INLINE VB narrow_byte(VI v) {
  const __m128i h = (__m128i)narrow_half(v);
  return __builtin_bit_cast(VB, _mm_cvtsi128_si64(_mm_packus_epi16(h, h)));
}
DIPTYCH_INLINE void put_bytes(uint8_t* p, VI a, VI b, VI c, VI d) {
  const __m256i ab = _mm256_packus_epi32((__m256i)a, (__m256i)b), cd = _mm256_packus_epi32((__m256i)c, (__m256i)d);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i*)p, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order));
}
DIPTYCH_INLINE float max_of_lanes(VF v) {
  const __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  const __m128 n = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(n, _mm_movehdup_ps(n)));
}
#else
DIPTYCH_INLINE VF max_skip_nan(VF x, VF acc) { return x > acc ? x : acc; }
DIPTYCH_INLINE VF max_abs_skip_nan(VF x, VF acc) { return max_skip_nan(abs(x), acc); }
// a * b is exact, and the sum rounds once, as in an fma: a and b are FP8 values (8 significant bits), or b is 0.
DIPTYCH_INLINE VF fma(VF a, VF b, VF c) { return a * b + c; }
DIPTYCH_INLINE VI widen(VH h) { return __builtin_convertvector(h, VI); }
DIPTYCH_INLINE VI widen(VB b) { return __builtin_convertvector(b, VI); }
DIPTYCH_INLINE VH narrow_half(VI v) { return __builtin_convertvector(v, VH); }
DIPTYCH_INLINE VB narrow_byte(VI v) { return __builtin_convertvector(v, VB); }
DIPTYCH_INLINE void put_bytes(uint8_t* p, VI a, VI b, VI c, VI d) {
  const VB bytes[4] = {narrow_byte(a), narrow_byte(b), narrow_byte(c), narrow_byte(d)};
  __builtin_memcpy(p, bytes, sizeof(bytes));
}
DIPTYCH_INLINE VF half_to_float(VH h) { return from_f16<VF>(widen(h)); }
DIPTYCH_INLINE VH float_to_half(VF x) { return narrow_half(to_f16<VI>(x)); }
DIPTYCH_INLINE float max_of_lanes(VF v) {
  const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
#endif

// Returns y, but NaN where x is infinite or NaN. A y of -0 keeps its sign if y is x or x times a factor (NUMERICS 1).
DIPTYCH_INLINE VF unless_infinite(VF x, VF y) { return fma(x, VF{}, y); }
// Returns the larger of |x| and m, or m where x is infinite or NaN.
DIPTYCH_INLINE VF max_finite(VF x, VF m) { return max_abs_skip_nan(unless_infinite(x, x), m); }

// Returns elements i .. i + lanes - 1 of an array of D as float32; the other lanes are zero.
template <DType D>
DIPTYCH_INLINE VF load(const void* base, int64_t i, AllLanes) {
  const char* p = static_cast<const char*>(base) + i * bytes(D);
  if constexpr (D == DType::f32) return load_as<VF>(p);
  if constexpr (D == DType::bf16) return from_bf16<VF>(widen(load_as<VH>(p)));
  if constexpr (D == DType::f16) return half_to_float(load_as<VH>(p));
}

template <DType D>
DIPTYCH_INLINE VF load(const void* base, int64_t i, int64_t lanes) {
  char part[4 * kLanes] = {};
  __builtin_memcpy(part, static_cast<const char*>(base) + i * bytes(D), lanes * bytes(D));
  return load<D>(part, 0, AllLanes{});
}

template <class V>
DIPTYCH_INLINE void put(void* p, V v, int64_t lanes) {
  __builtin_memcpy(p, &v, lanes * (sizeof(V) / kLanes));
}

template <DType D>
DIPTYCH_INLINE void store(void* base, int64_t i, VF x, auto lanes) {
  char* p = static_cast<char*>(base) + i * bytes(D);
  if constexpr (D == DType::f32) put(p, x, lanes);
  if constexpr (D == DType::bf16) put(p, narrow_half(to_bf16<VI>(x)), lanes);
  if constexpr (D == DType::f16) put(p, float_to_half(x), lanes);
}

DIPTYCH_INLINE VI load_bytes(const uint8_t* p, AllLanes) { return widen(load_as<VB>(p)); }
DIPTYCH_INLINE VI load_bytes(const uint8_t* p, int64_t lanes) {
  uint8_t part[kLanes] = {};
  __builtin_memcpy(part, p, lanes);
  return load_bytes(part, AllLanes{});
}

// Calls f.template operator()<D>() for the high-precision dtype D == d.
template <class Fn>
DIPTYCH_INLINE void with_dtype(DType d, Fn f) {
  if (d == DType::f32) {
    f.template operator()<DType::f32>();
  } else if (d == DType::bf16) {
    f.template operator()<DType::bf16>();
  } else {
    f.template operator()<DType::f16>();
  }
}

template <class Fn>
DIPTYCH_INLINE void with_element(DType d, Fn f) {
  if (d == DType::e4m3) {
    f.template operator()<E4M3>();
  } else {
    f.template operator()<E5M2>();
  }
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych::cpu
