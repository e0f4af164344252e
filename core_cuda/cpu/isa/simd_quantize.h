// The inner loops of amax, quantize, dequantize and bias_grad for one instruction set.
#pragma once

#include "cpu/isa/isa.h"
#include "cpu/isa/simd.h"

namespace diptych::cpu {
inline namespace DIPTYCH_ISA {

template <DType D>
DIPTYCH_INLINE float amax_of(const void* x, int64_t first, int64_t n) {
  VF m[4] = {};
  int64_t i = first;
  const int64_t end = first + n;
  for (; i + 4 * kLanes <= end; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) m[j] = max_finite(load<D>(x, i + j * kLanes, AllLanes{}), m[j]);
  for (; i + kLanes <= end; i += kLanes) m[0] = max_finite(load<D>(x, i, AllLanes{}), m[0]);
  if (i < end) m[1] = max_finite(load<D>(x, i, end - i), m[1]);
  return max_of_lanes(max_skip_nan(max_skip_nan(m[0], m[1]), max_skip_nan(m[2], m[3])));
}

inline float amax(DType dtype, const void* x, int64_t n) {
  float m = 0;
  with_dtype(dtype, [&]<DType D>() DIPTYCH_LAMBDA { m = amax_of<D>(x, 0, n); });
  return m;
}

// Lane i of the result is the maximum of m[i]: each round halves the vectors, keeping their order.
template <int N>
DIPTYCH_INLINE VF max_of_each(VF (&m)[N]) {
  if constexpr (N == 1) {
    return m[0];
  } else {
    VF half[N / 2];
    for (int i = 0; i < N / 2; ++i)
      half[i] = max_skip_nan(every_other<0>(m[2 * i], m[2 * i + 1]), every_other<1>(m[2 * i], m[2 * i + 1]));
    return max_of_each(half);
  }
}

// Takes as many segments at a time as a vector has lanes. Returns how many elements are done.
template <DType D>
DIPTYCH_INLINE int64_t whole_segments(const void* x, int64_t n, int64_t segment, float*& out) {
  int64_t i = 0;
  for (; i + kLanes * segment <= n; out += kLanes) {
    VF m[kLanes];
    for (int j = 0; j < kLanes; ++j, i += segment) {
      m[j] = max_finite(load<D>(x, i, AllLanes{}), VF{});
      for (int64_t v = kLanes; v < segment; v += kLanes) m[j] = max_finite(load<D>(x, i + v, AllLanes{}), m[j]);
    }
    put(out, max_of_each(m), AllLanes{});
  }
  return i;
}

template <DType D>
DIPTYCH_INLINE void segment_amax_of(const void* x, int64_t n, int64_t segment, float* out) {
  int64_t i = 0;
  if (segment == 1) {
    sweep(n, [&](int64_t at, auto lanes)
                 DIPTYCH_LAMBDA { store<DType::f32>(out, at, max_finite(load<D>(x, at, lanes), VF{}), lanes); });
    return;
  }
  if (segment == 32) {  // a compile-time length needs no loop
    i = whole_segments<D>(x, n, 32, out);
  } else if (segment % kLanes == 0) {
    i = whole_segments<D>(x, n, segment, out);
  }
  for (; i < n; i += segment) *out++ = amax_of<D>(x, i, n - i < segment ? n - i : segment);
}

inline void segment_amax(DType dtype, const void* x, int64_t n, int64_t segment, float* out) {
  with_dtype(dtype, [&]<DType D>() DIPTYCH_LAMBDA { segment_amax_of<D>(x, n, segment, out); });
}

// Strips of eight vectors stay in registers down all rows.
inline void column_amax(DType dtype, const void* x, int64_t ld, int64_t rows, int64_t cols, float* out) {
  with_dtype(dtype, [&]<DType D>() DIPTYCH_LAMBDA {
    constexpr int kStrip = 8;
    int64_t c = 0;
    for (; c + kStrip * kLanes <= cols; c += kStrip * kLanes) {
      VF m[kStrip] = {};
      for (int64_t r = 0; r < rows; ++r)
        for (int j = 0; j < kStrip; ++j) m[j] = max_finite(load<D>(x, r * ld + c + j * kLanes, AllLanes{}), m[j]);
      for (int j = 0; j < kStrip; ++j) store<DType::f32>(out, c + j * kLanes, m[j], AllLanes{});
    }
    sweep(cols - c, [&](int64_t i, auto lanes) DIPTYCH_LAMBDA {
      VF m = {};
      for (int64_t r = 0; r < rows; ++r) m = max_finite(load<D>(x, r * ld + c + i, lanes), m);
      store<DType::f32>(out, c + i, m, lanes);
    });
  });
}

inline void load_f32(DType dtype, const void* x, int64_t n, float* out) {
  with_dtype(dtype, [&]<DType D>() DIPTYCH_LAMBDA {
    sweep(n, [&](int64_t i, auto lanes) DIPTYCH_LAMBDA { store<DType::f32>(out, i, load<D>(x, i, lanes), lanes); });
  });
}

inline void store_f32(DType dtype, const float* x, int64_t n, void* out) {
  with_dtype(dtype, [&]<DType D>() DIPTYCH_LAMBDA {
    sweep(n, [&](int64_t i, auto lanes) DIPTYCH_LAMBDA { store<D>(out, i, load<DType::f32>(x, i, lanes), lanes); });
  });
}

// NUMERICS 2: scale and 1 / scale, both correctly rounded divisions
DIPTYCH_INLINE VF divide_scale(const ScaleParams& p, VF amax) {
  amax = amax < p.eps ? splat(p.eps) : amax;
  VF scale = p.max / amax;
  scale = bits_as<VI>(scale) == kInfBits ? splat(p.value_for_inf) : scale;
  if (p.pow2) scale = bits_as<VF>(bits_as<VI>(scale) & static_cast<int32_t>(0xFF800000));
  const VI odd = (amax == 0.0f) | ((bits_as<VI>(amax) & 0x7FFFFFFF) >= kInfBits);
  return odd ? splat(1.0f) : scale;
}

inline void scales(const ScaleParams& p, const float* amax, int64_t n, float* multiplier, float* inv, uint8_t* code) {
  if (p.rule == ScaleRule::divide) {
    sweep(n, [&](int64_t i, auto lanes) DIPTYCH_LAMBDA {
      const VF scale = divide_scale(p, load<DType::f32>(amax, i, lanes));
      put(multiplier + i, scale, lanes);
      put(inv + i, 1.0f / scale, lanes);
    });
  } else {
    const float reciprocal = 1.0f / p.max;
    sweep(n, [&](int64_t i, auto lanes) DIPTYCH_LAMBDA {
      const VI c = e8m0_ceil<VI>(load<DType::f32>(amax, i, lanes) * reciprocal);
      put(multiplier + i, e8m0_inverse<VF>(c), lanes);
      put(code + i, narrow_byte(c), lanes);
    });
  }
}

// out = encode(x * by), and NaN where x is infinite; `by` is one value or one per element. `bounded`: no product of a
// finite x is infinite, so an infinite product implies an infinite x.
template <class E, DType D, bool bounded, class By>
DIPTYCH_INLINE void encode_run(const void* x, int64_t first, int64_t n, By by, uint8_t* out) {
  const auto encoded = [&](int64_t at, auto lanes) DIPTYCH_LAMBDA {
    const VF v = load<D>(x, at, lanes), scaled = v * by(at, lanes);
    return encode<E, VI, bounded>(bounded ? scaled : unless_infinite(v, scaled));
  };
  int64_t i = first;
  const int64_t end = first + n;
  for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
    VI code[4];
    for (int j = 0; j < 4; ++j) code[j] = encoded(i + j * kLanes, AllLanes{});
    put_bytes(out + i, code[0], code[1], code[2], code[3]);
  }
  sweep(end - i,
        [&](int64_t j, auto lanes) DIPTYCH_LAMBDA { put(out + i + j, narrow_byte(encoded(i + j, lanes)), lanes); });
}

template <class E, DType D, class By>
DIPTYCH_INLINE void decode_run(const uint8_t* q, int64_t first, int64_t n, By by, void* out) {
  sweep(n, [&](int64_t i, auto lanes) DIPTYCH_LAMBDA {
    store<D>(out, first + i, decode<E, VF>(load_bytes(q + first + i, lanes)) * by(first + i, lanes), lanes);
  });
}

// Calls run(first, count, by) over [0, n); `by` gives factor[i / width] for element i.
template <class Run>
DIPTYCH_INLINE void with_factors(const float* factor, int64_t width, int64_t n, Run run) {
  if (width >= 4 * kLanes) {
    for (int64_t i = 0; i < n; i += width, ++factor) {
      const VF by = splat(*factor);
      run(i, n - i < width ? n - i : width, [&](int64_t, auto) DIPTYCH_LAMBDA { return by; });
    }
    return;
  }
  // Short blocks: factors are expanded to one per element, for a part of the row at a time.
  constexpr int64_t kPart = 1024;
  alignas(64) float each[kPart + 4 * kLanes];
  const int64_t part = width == 1 ? n : kPart / width * width;
  for (int64_t i = 0; i < n; i += part) {
    const int64_t count = n - i < part ? n - i : part;
    if (width != 1) {
      for (int64_t c = 0; c < count; c += width, ++factor) {
        const VF by = splat(*factor);
        for (int64_t j = 0; j < width; j += kLanes) put(each + c + j, by, AllLanes{});
      }
    }
    const float* by = width == 1 ? factor : each - i;
    run(i, count, [by](int64_t at, auto lanes) DIPTYCH_LAMBDA { return load<DType::f32>(by, at, lanes); });
  }
}

inline void encode_row(DType element, DType dtype, const void* x, const float* multiplier, bool bounded, int64_t width,
                       int64_t n, uint8_t* out) {
  with_element(element, [&]<class E>() DIPTYCH_LAMBDA {
    with_dtype(dtype, [&]<DType D>() DIPTYCH_LAMBDA {
      if (bounded) {
        with_factors(multiplier, width, n, [&](int64_t first, int64_t count, auto by) DIPTYCH_LAMBDA {
          encode_run<E, D, true>(x, first, count, by, out);
        });
      } else {  // one factor for all elements, given by the caller
        const VF by = splat(*multiplier);
        encode_run<E, D, false>(x, 0, n, [&](int64_t, auto) DIPTYCH_LAMBDA { return by; }, out);
      }
    });
  });
}

inline void decode_row(DType element, const uint8_t* q, const float* scale_inv, int64_t width, int64_t n, DType dtype,
                       void* out) {
  with_element(element, [&]<class E>() DIPTYCH_LAMBDA {
    with_dtype(dtype, [&]<DType D>() DIPTYCH_LAMBDA {
      with_factors(scale_inv, width, n, [&](int64_t first, int64_t count, auto by) DIPTYCH_LAMBDA {
        decode_run<E, D>(q, first, count, by, out);
      });
    });
  });
}

inline void shift_bytes(const ByteShift& s, int64_t n, uint8_t* bytes) {
  using V = uint8_t __attribute__((vector_size(4 * kLanes)));
  const auto shifted = [&s](V byte) DIPTYCH_LAMBDA {
    const V magnitude = byte & 0x7F;
    V small = {};
    for (const uint8_t least : s.reaches) small -= (V)(magnitude >= least);  // a true lane is -1
    const V normal = magnitude >= s.normal ? magnitude - s.down : small;
    return magnitude >= s.nan ? V{} + uint8_t{0x7F} : normal | (byte & 0x80);
  };
  int64_t i = 0;
  for (; i + int64_t{sizeof(V)} <= n; i += sizeof(V)) {
    const V out = shifted(load_as<V>(bytes + i));
    __builtin_memcpy(bytes + i, &out, sizeof(V));
  }
  if (i == n) return;
  V last = {};
  __builtin_memcpy(&last, bytes + i, n - i);
  last = shifted(last);
  __builtin_memcpy(bytes + i, &last, n - i);
}

inline void column_sum(DType dtype, const void* x, int64_t ld, int64_t rows, int64_t cols, float* acc) {
  with_dtype(dtype, [&]<DType D>() DIPTYCH_LAMBDA {
    for (int64_t r = 0; r < rows; ++r) {
      const void* line = static_cast<const char*>(x) + r * ld * bytes(D);
      sweep(cols, [&](int64_t c, auto lanes) DIPTYCH_LAMBDA {
        put(acc + c, load<DType::f32>(acc, c, lanes) + load<D>(line, c, lanes), lanes);
      });
    }
  });
}

// Strips of four vectors stay in registers down all rows.
inline void sum_rows(DType dtype, const void* const* rows, const float* by, int64_t count, int64_t n, void* out) {
  with_dtype(dtype, [&]<DType D>() DIPTYCH_LAMBDA {
    constexpr int kStrip = 4;
    int64_t c = 0;
    for (; c + kStrip * kLanes <= n; c += kStrip * kLanes) {
      VF acc[kStrip] = {};
      for (int64_t r = 0; r < count; ++r) {
        const VF p = splat(by[r]);
        for (int j = 0; j < kStrip; ++j) acc[j] = acc[j] + p * load<D>(rows[r], c + j * kLanes, AllLanes{});
      }
      for (int j = 0; j < kStrip; ++j) store<D>(out, c + j * kLanes, acc[j], AllLanes{});
    }
    sweep(n - c, [&](int64_t i, auto lanes) DIPTYCH_LAMBDA {
      VF acc = {};
      for (int64_t r = 0; r < count; ++r) acc = acc + splat(by[r]) * load<D>(rows[r], c + i, lanes);
      store<D>(out, c + i, acc, lanes);
    });
  });
}

// Copies rows with prefetches, because rows far apart give the hardware prefetcher no stream to follow.
inline void gather(const char* src, int64_t ld_src, int64_t rows, int64_t bytes, char* dst, int64_t ld_dst) {
  constexpr int64_t kAhead = 4096;
  const int64_t ahead = (kAhead / bytes + 1) * ld_src;
  for (int64_t r = 0; r < rows; ++r, src += ld_src, dst += ld_dst) {
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
      __builtin_prefetch(src + ahead + i, 0, 2);
      __builtin_memcpy(dst + i, src + i, 64);
    }
    if (i < bytes) __builtin_memcpy(dst + i, src + i, bytes - i);
  }
}

using V16B = uint8_t __attribute__((vector_size(16)));

// Four rounds of interleaving rows i and i + 8 transpose a 16 x 16 square.
DIPTYCH_INLINE void transpose_square(V16B (&r)[16]) {
  for (int round = 0; round < 4; ++round) {
    V16B t[16];
    for (int i = 0; i < 8; ++i) {
      t[2 * i] = __builtin_shufflevector(r[i], r[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t[2 * i + 1] =
          __builtin_shufflevector(r[i], r[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int i = 0; i < 16; ++i) r[i] = t[i];
  }
}

// dst [16, ld_dst] = src [rows, cols].T for rows, cols <= 16, absent elements zero; dst rows are 16 wide
DIPTYCH_INLINE void transpose_16(const uint8_t* src, int64_t ld_src, int64_t rows, int64_t cols, uint8_t* dst,
                                 int64_t ld_dst) {
  V16B r[16];
  if (rows == 16 && cols == 16) {
    for (int i = 0; i < 16; ++i) r[i] = load_as<V16B>(src + i * ld_src);
  } else {
    for (int i = 0; i < 16; ++i) {
      r[i] = V16B{};
      if (i < rows) __builtin_memcpy(&r[i], src + i * ld_src, cols);
    }
  }
  transpose_square(r);
  for (int i = 0; i < 16; ++i) __builtin_memcpy(dst + i * ld_dst, &r[i], 16);
}

// Stores 64 aligned bytes to memory without reading them into a cache; stream_end orders the stores.
DIPTYCH_INLINE void stream_line(uint8_t* dst, const uint8_t* src) {
#if DIPTYCH_LANES == 16 && defined(__x86_64__)
  _mm512_stream_si512((__m512i*)dst, load_as<__m512i>(src));
#elif DIPTYCH_LANES == 8 && defined(__x86_64__)
  for (int i = 0; i < 64; i += 32) _mm256_stream_si256((__m256i*)(dst + i), load_as<__m256i>(src + i));
#else
  __builtin_memcpy(dst, src, 64);
#endif
}
DIPTYCH_INLINE void stream_end() {
#if DIPTYCH_LANES > 4 && defined(__x86_64__)
  _mm_sfence();
#endif
}

// Gathers long runs of each destination row before writing it, because destination rows may all map to the same few
// cache lines; prefetches destination rows early.
inline void transpose(const uint8_t* src, int64_t ld_src, int64_t rows, int64_t cols, uint8_t* dst, int64_t ld_dst) {
  constexpr int64_t kRun = 256;
  constexpr int64_t kFar = 4096;  // row pitch in bytes of a matrix that is too large to be in a cache when it is read
  const bool stream = ld_dst >= kFar && rows < ld_dst && (reinterpret_cast<uintptr_t>(dst) | ld_dst) % 64 == 0;
  alignas(64) uint8_t run[16][kRun];
  for (int64_t r = 0; r < rows; r += kRun) {
    const int64_t nr = rows - r < kRun ? rows - r : kRun;
    for (int64_t c = 0; c < cols; c += 16) {
      const int64_t nc = cols - c < 16 ? cols - c : 16;
      uint8_t* to = dst + c * ld_dst + r;
      for (int64_t j = 32; j < 48 && !stream; ++j)
        for (int64_t i = 0; i < nr; i += 64) __builtin_prefetch(to + j * ld_dst + i, 1, 2);
      for (int64_t i = 0; i < nr; i += 16)
        transpose_16(src + (r + i) * ld_src + c, ld_src, nr - i < 16 ? nr - i : 16, nc, &run[0][i], kRun);
      for (int64_t j = 0; j < nc; ++j) {
        int64_t i = 0;
        for (; i + 64 <= nr; i += 64) {
          if (stream) {
            stream_line(to + j * ld_dst + i, &run[j][i]);
          } else {
            __builtin_memcpy(to + j * ld_dst + i, &run[j][i], 64);
          }
        }
        if (i < nr) __builtin_memcpy(to + j * ld_dst + i, &run[j][i], nr - i);
      }
    }
  }
  if (stream) stream_end();
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych::cpu
