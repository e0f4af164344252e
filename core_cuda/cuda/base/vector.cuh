// Eight neighbouring elements of a row in registers, and 8 x 8 patches of elements, for the quantize kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "cuda/base/codec.cuh"
#include "cuda/base/scale.cuh"
#include "diptych/dtype.h"
#include "diptych/status.h"

namespace diptych::cuda {

constexpr unsigned kAllLanes = 0xffffffff;

// Calls f with a value of the C++ type of a high-precision dtype: f(float{}), f(__half{}) or f(__nv_bfloat16{}).
template <typename F>
Status with_float_type(DType d, const char* op, F&& f) {
  switch (d) {
    case DType::f32:
      return f(float{});
    case DType::f16:
      return f(__half{});
    case DType::bf16:
      return f(__nv_bfloat16{});
    default:
      return {Code::type, std::string(op) + ": no CUDA kernel for " + name(d)};
  }
}

// Calls f(std::bool_constant<is E5M2>{}).
template <typename F>
Status with_element(DType d, const char* op, F&& f) {
  if (d == DType::e4m3) return f(std::false_type{});
  if (d == DType::e5m2) return f(std::true_type{});
  return {Code::unsupported, std::string(op) + ": no CUDA kernel for elements of type " + name(d)};
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounds once, by IEEE rules; overflow gives inf.
template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// Packs two values into a word, the first in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float a, float b) {
  uint32_t u;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 h = __floats2half2_rn(a, b);
    memcpy(&u, &h, sizeof(u));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    memcpy(&u, &h, sizeof(u));
  }
  return u;
}

// 16 bytes of T as floats.
template <typename T>
struct Vec {
  static constexpr int kCount = 16 / sizeof(T);
  uint32_t w[4] = {0, 0, 0, 0};

  __device__ __forceinline__ static Vec load(const T* p) {
    const uint4 u = __ldg(reinterpret_cast<const uint4*>(p));
    Vec v;
    v.w[0] = u.x, v.w[1] = u.y, v.w[2] = u.z, v.w[3] = u.w;
    return v;
  }
  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (std::is_same_v<T, float>) {
      return float_of(w[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return float_of(i % 2 ? w[i / 2] & 0xffff0000 : w[i / 2] << 16);
    } else {
      __half_raw h;
      h.x = static_cast<unsigned short>(i % 2 ? w[i / 2] >> 16 : w[i / 2] & 0xffff);
      return __half2float(__half(h));
    }
  }
};

// Eight neighbours of a row.
template <typename T>
struct Row8 {
  static constexpr int kVecs = 8 / Vec<T>::kCount;
  Vec<T> v[kVecs];

  __device__ __forceinline__ float operator[](int i) const { return v[i / Vec<T>::kCount][i % Vec<T>::kCount]; }
};

// Loads columns col .. col + 7 of row `row` of x [rows, cols], 0 outside of x. `vec`: x is aligned to 16 bytes, and
// cols % 8 == 0.
template <typename T>
__device__ __forceinline__ Row8<T> load_row8(const T* x, int64_t rows, int64_t cols, int64_t row, int64_t col,
                                             bool vec) {
  Row8<T> r;
  if (row >= rows || col >= cols) return r;
  const T* p = x + row * cols + col;
  if (vec) {
#pragma unroll
    for (int i = 0; i < Row8<T>::kVecs; ++i) r.v[i] = Vec<T>::load(p + i * Vec<T>::kCount);
    return r;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (col + j >= cols) continue;
    constexpr int kN = Vec<T>::kCount;
    if constexpr (sizeof(T) == 4) {
      r.v[j / kN].w[j % kN] = __builtin_bit_cast(uint32_t, p[j]);
    } else {
      r.v[j / kN].w[j % kN / 2] |= static_cast<uint32_t>(__builtin_bit_cast(unsigned short, p[j])) << (j % 2 * 16);
    }
  }
  // Holds back the single loads of other rows: 64 of them in flight would take registers from the fast path.
  asm volatile("" ::: "memory");
  return r;
}

// without_inf for a pair of 16-bit elements.
template <typename T>
__device__ __forceinline__ uint32_t without_inf2(uint32_t two) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, __half>) {
    asm("fma.rn.f16x2 %0, %0, %1, %0;" : "+r"(two) : "r"(0));
  } else {
    asm("fma.rn.bf16x2 %0, %0, %1, %0;" : "+r"(two) : "r"(0));
  }
  return two;
#else
  constexpr uint32_t kInf = std::is_same_v<T, __half> ? 0x7c00 : 0x7f80;
  const uint32_t low = (two & kInf) == kInf ? 0x7fff : two & 0xffff;
  const uint32_t high = (two >> 16 & kInf) == kInf ? 0x7fff : two >> 16;
  return low | high << 16;
#endif
}

template <typename T>
__device__ __forceinline__ Vec<T> without_inf(Vec<T> v) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      v.w[i] = bits_of(without_inf(float_of(v.w[i])));
    } else {
      v.w[i] = without_inf2<T>(v.w[i]);
    }
  }
  return v;
}

template <typename T>
__device__ __forceinline__ Row8<T> without_inf(Row8<T> r) {
#pragma unroll
  for (int i = 0; i < Row8<T>::kVecs; ++i) r.v[i] = without_inf(r.v[i]);
  return r;
}

template <typename T>
__device__ __forceinline__ void drop_inf(Row8<T> (&x)[8]) {
#pragma unroll
  for (Row8<T>& r : x) r = without_inf(r);
}

// Returns the larger magnitudes of two pairs, with arbitrary signs; a NaN loses to a number, as in max_abs.
template <typename T>
__device__ __forceinline__ uint32_t max_abs2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  if constexpr (std::is_same_v<T, __half>) {
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
  } else {
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
  }
#else
  a &= 0x7fff7fff, b &= 0x7fff7fff;
  if constexpr (std::is_same_v<T, __half>) {
    __half2 x, y;
    memcpy(&x, &a, sizeof(a)), memcpy(&y, &b, sizeof(b));
    x = __hmax2(x, y);
    memcpy(&a, &x, sizeof(a));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    __nv_bfloat162 x, y;
    memcpy(&x, &a, sizeof(a)), memcpy(&y, &b, sizeof(b));
    x = __hmax2(x, y);
    memcpy(&a, &x, sizeof(a));
  }
#endif
  return a;
}

template <typename T>
__device__ __forceinline__ float max_abs(float m, const Vec<T>& v) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) m = max_abs(m, v[i]);
    return m;
  } else {
    Vec<T> both;
    both.w[0] = max_abs2<T>(max_abs2<T>(v.w[0], v.w[1]), max_abs2<T>(v.w[2], v.w[3]));
    return max_abs(max_abs(m, both[0]), both[1]);
  }
}

template <typename T>
__device__ __forceinline__ float max_abs(float m, const Row8<T>& r) {
#pragma unroll
  for (int i = 0; i < Row8<T>::kVecs; ++i) m = max_abs(m, r.v[i]);
  return m;
}

// Marks a condition as unlikely. Maxima are nearly always finite: testing them costs less than removing infinities
// first.
__device__ __forceinline__ bool rarely(bool x) { return __builtin_expect(x, false); }

// Returns the largest finite |x|.
template <typename T>
__device__ __forceinline__ float max_finite(const Row8<T>& r) {
  if constexpr (sizeof(T) == 4) return max_abs(0.0f, without_inf(r));
  const float m = max_abs(0.0f, r);
  return rarely(m == INFINITY) ? max_abs(0.0f, without_inf(r)) : m;
}

// v[j] = max over the eight rows of column j.
template <typename T>
__device__ __forceinline__ void column_max_abs(const Row8<T> (&x)[8], float (&v)[8]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      v[j] = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) v[j] = max_abs(v[j], x[i][j]);
    }
  } else {
    Row8<T> m = x[0];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#pragma unroll
      for (int i = 1; i < 8; ++i) m.v[0].w[w] = max_abs2<T>(m.v[0].w[w], x[i].v[0].w[w]);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = max_abs(0.0f, m[j]);
  }
}

// Stores eight bytes to those of columns col .. col + 7 of q [rows, cols] that exist. `vec`: q is aligned to 8 bytes,
// and cols % 8 == 0.
__device__ __forceinline__ void store_row8(uint8_t* q, int64_t rows, int64_t cols, int64_t row, int64_t col, bool vec,
                                           uint2 bytes) {
  if (row >= rows || col >= cols) return;
  uint8_t* p = q + row * cols + col;
  if (vec) {
    *reinterpret_cast<uint2*>(p) = bytes;
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (col + j < cols) p[j] = static_cast<uint8_t>((j < 4 ? bytes.x : bytes.y) >> (j % 4 * 8));
  }
}

// Stores eight bytes of each of rows row .. row + kRows - 1: those that bytes(i) returns for row row + i. `whole`: they
// are all aligned and inside q.
template <int kRows, typename Bytes>
__device__ __forceinline__ void store_rows8(uint8_t* q, int64_t rows, int64_t cols, int64_t row, int64_t col, bool vec,
                                            bool whole, Bytes&& bytes) {
  if (whole) {
    uint8_t* p = q + row * cols + col;
#pragma unroll
    for (int i = 0; i < kRows; ++i, p += cols) *reinterpret_cast<uint2*>(p) = bytes(i);
    return;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) store_row8(q, rows, cols, row + i, col, vec, bytes(i));
}

// Encodes eight elements of a row, each times its own scale.
template <bool kE5M2, bool kNaN = true, typename T, typename Scale>
__device__ __forceinline__ uint2 encode_row8(const Row8<T>& r, Scale&& scale) {
  float y[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) y[j] = multiply_rn(r[j], scale(j));
  return {encode4<kE5M2, kNaN>(y[0], y[1], y[2], y[3]), encode4<kE5M2, kNaN>(y[4], y[5], y[6], y[7])};
}

// Transposes bytes [4][4] in place, a row in each word.
__device__ __forceinline__ void transpose4x4(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const uint32_t ab_lo = __byte_perm(a, b, 0x5140), ab_hi = __byte_perm(a, b, 0x7362);
  const uint32_t cd_lo = __byte_perm(c, d, 0x5140), cd_hi = __byte_perm(c, d, 0x7362);
  a = __byte_perm(ab_lo, cd_lo, 0x5410), b = __byte_perm(ab_lo, cd_lo, 0x7632);
  c = __byte_perm(ab_hi, cd_hi, 0x5410), d = __byte_perm(ab_hi, cd_hi, 0x7632);
}

// Transposes bytes [8][8] in place, a row in each pair of words.
__device__ __forceinline__ void transpose8x8(uint2 (&q)[8]) {
  transpose4x4(q[0].x, q[1].x, q[2].x, q[3].x);
  transpose4x4(q[0].y, q[1].y, q[2].y, q[3].y);
  transpose4x4(q[4].x, q[5].x, q[6].x, q[7].x);
  transpose4x4(q[4].y, q[5].y, q[6].y, q[7].y);
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // swap the off-diagonal quarters
    const uint32_t t = q[i].y;
    q[i].y = q[i + 4].x, q[i + 4].x = t;
  }
}

// One step of a reduction that also distributes its values over lanes: of v[0 .. 2 kKeep) this lane keeps the half that
// its bit `mask` selects, as maxima with the partner lane's. After log2 steps each lane holds the maximum of one value.
template <int kKeep>
__device__ __forceinline__ void max_and_halve(float* v, int lane, int mask) {
  const bool upper = lane & mask;
#pragma unroll
  for (int i = 0; i < kKeep; ++i) {
    const float keep = upper ? v[i + kKeep] : v[i], send = upper ? v[i] : v[i + kKeep];
    v[i] = fmaxf(keep, __shfl_xor_sync(kAllLanes, send, mask));
  }
}

}  // namespace diptych::cuda
