// What the kernels share that encode tiles of permuted rows: patches of 8 x 8 elements of 16 bits, which a thread
// gathers, and whose maxima it takes two at a time.
#pragma once

#include <algorithm>

#include "cuda/fused/source.cuh"
#include "cuda/vector.cuh"

namespace diptych::cuda {

// The larger magnitudes of two pairs, under any signs; a NaN wins over a number.
template <typename T>
__device__ __forceinline__ uint32_t max_abs_nan2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  if constexpr (std::is_same_v<T, __half>) {
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
  }
  return a;
#else  // magnitudes order as their bits do
  const uint32_t lo = max(a & 0x7fff, b & 0x7fff), hi = max(a & 0x7fff0000, b & 0x7fff0000);
  return lo | hi;
#endif
}

template <typename T>
__device__ __forceinline__ float lower(uint32_t two) {
  if constexpr (std::is_same_v<T, __half>) return __half2float(__ushort_as_half(static_cast<unsigned short>(two)));
  return float_of(two << 16);
}
template <typename T>
__device__ __forceinline__ float upper(uint32_t two) {
  if constexpr (std::is_same_v<T, __half>) return lower<T>(two >> 16);
  return float_of(two & 0xffff0000);
}

// base + row * pitch, in one instruction.
template <typename P>
__device__ __forceinline__ P* row_at(P* base, uint32_t row, uint32_t pitch) {
#ifdef __CUDA_ARCH__
  P* at;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(row), "r"(pitch), "l"(base));
  return at;
#else
  return base + static_cast<uint64_t>(row) * pitch;
#endif
}

template <typename T>
struct Patch {
  static_assert(sizeof(T) == 2);
  Row8<T> x[8];

  // Row i is columns col .. col + 7 of the token that origin(i) names, zeros where it names none.
  template <typename Origin>
  __device__ __forceinline__ void gather(const SourceArgs& p, int64_t col, Origin&& origin) {
    const char* base = static_cast<const char*>(p.x.data) + col * sizeof(T);
    const uint32_t pitch = static_cast<uint32_t>(p.cols * sizeof(T));
    const bool inside = col < p.k;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t token = origin(i);
      const T* from = reinterpret_cast<const T*>(row_at(base, token, pitch));
      if (inside && token < p.from.none) x[i].v[0] = Vec<T>::load(from);
    }
  }

  // Maxima of columns 2 j (lower half) and 2 j + 1, without regard to NaN. Whether a lane of the warp holds one.
  __device__ __forceinline__ bool column_maxima(uint32_t (&m)[4]) const {
    columns([](uint32_t a, uint32_t b) { return max_abs_nan2<T>(a, b); }, m);
    const uint32_t all = max_abs_nan2<T>(max_abs_nan2<T>(m[0], m[1]), max_abs_nan2<T>(m[2], m[3]));
    const float lo = lower<T>(all), hi = upper<T>(all);
    const bool nan = __any_sync(kAllLanes, lo != lo || hi != hi);
    if (nan) columns([](uint32_t a, uint32_t b) { return max_abs2<T>(a, b); }, m);
    return nan;
  }

  // Eight bytes of column j.
  template <bool kE5M2, bool kNaN>
  __device__ __forceinline__ uint2 encode_column(int j, float scale) const {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = multiply_rn(x[i][j], scale);
    return {encode4<kE5M2, kNaN>(y[0], y[1], y[2], y[3]), encode4<kE5M2, kNaN>(y[4], y[5], y[6], y[7])};
  }

 private:
  template <typename Max>
  __device__ __forceinline__ void columns(Max&& max, uint32_t (&m)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      m[j] = x[0].v[0].w[j];
#pragma unroll
      for (int i = 1; i < 8; ++i) m[j] = max(m[j], x[i].v[0].w[j]);
    }
  }
};

// max_and_halve of pairs.
template <typename T, int kKeep>
__device__ __forceinline__ void max_and_halve2(uint32_t* v, int lane, int mask) {
  const bool second = lane & mask;
#pragma unroll
  for (int i = 0; i < kKeep; ++i) {
    const uint32_t keep = second ? v[i + kKeep] : v[i], send = second ? v[i] : v[i + kKeep];
    v[i] = max_abs2<T>(keep, __shfl_xor_sync(kAllLanes, send, mask));
  }
}

// The grid walks strips of `across` tile columns one after the other, each from its first row to its last: all that the
// tiles of a strip read of x lies in L2, where every further destination of a token finds it.
constexpr int64_t kStripBytes = 8 << 20;

class Strips {
 public:
  Strips() = default;
  // Of tiles that are `width` columns wide, so many down and along the rows.
  Strips(const SourceArgs& p, int64_t width, int64_t down, int64_t along) {
    const int64_t bytes_of_one = std::max<int64_t>(1, static_cast<int64_t>(p.from.none) * width * 2);
    across_ = static_cast<uint32_t>(std::clamp<int64_t>(kStripBytes / bytes_of_one, 1, along));
    last_ = static_cast<uint32_t>(along / across_);
    const uint32_t rest = static_cast<uint32_t>(along % across_);
    size_ = static_cast<uint32_t>(down) * across_;
    by_size_ = Divider(size_), by_across_ = Divider(across_), by_rest_ = Divider(rest);
    rest_ = rest;
  }
  __device__ __forceinline__ void place(uint32_t index, uint32_t* tile_m, uint32_t* tile_k) const {
    const uint32_t strip = by_size_(index), inside = index - strip * size_;
    const bool whole = strip < last_;
    *tile_m = whole ? by_across_(inside) : by_rest_(inside);
    *tile_k = strip * across_ + inside - *tile_m * (whole ? across_ : rest_);
  }

 private:
  uint32_t across_ = 1, last_ = 0, rest_ = 0, size_ = 1;  // rest_: width of what is left after `last_` strips
  Divider by_size_, by_across_, by_rest_;
};

// Patches are made of permuted rows of bfloat16 or float16, in whole vectors, not too long for a pitch of 32 bits.
inline bool patched(const SourceArgs& p) {
  return p.kind == SourceKind::permuted && p.vec && p.x.type != DType::f32 && p.k < 0x40000000;
}

// f of their type.
template <typename F>
Status with_patch_type(const SourceArgs& p, F&& f) {
  return p.x.type == DType::f16 ? f(__half{}) : f(__nv_bfloat16{});
}

// Rowwise bytes of the patch at (row, col), multiplied by `scale`, to q and to `out` [m, k], null: nowhere.
template <bool kE5M2, bool kNaN, typename T>
__device__ __forceinline__ void encode_rows(const Patch<T>& patch, uint8_t* out, int64_t m, int64_t k, int64_t row,
                                            int64_t col, uint2 (&q)[8], float scale) {
  const int left = out && col < k ? static_cast<int>(min(m - row, int64_t{8})) : 0;
  uint8_t* to = out + row * k + col;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    q[i] = encode_row8<kE5M2, kNaN>(patch.x[i], [&](int) { return scale; });
    uint2* at = reinterpret_cast<uint2*>(row_at(to, i, static_cast<uint32_t>(k)));
    if (i < left) __stcs(at, q[i]);
  }
}

}  // namespace diptych::cuda
