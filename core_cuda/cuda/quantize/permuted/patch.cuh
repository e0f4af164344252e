// Helpers of the kernels that encode tiles of permuted rows: patches of 8 x 8 elements of 16 bits, which a thread
// gathers, and whose maxima it computes in pairs.
#pragma once

#include <algorithm>

#include "cuda/base/vector.cuh"
#include "cuda/source/source.cuh"

namespace diptych::cuda {

// Returns the larger magnitudes of two pairs, with arbitrary signs; a NaN wins over a number.
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

// Returns whether both halves are finite.
template <typename T>
__device__ __forceinline__ bool finite2(uint32_t two) {
  return fabsf(lower<T>(two)) < INFINITY && fabsf(upper<T>(two)) < INFINITY;
}

// Returns base + row * pitch, computed in one instruction.
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

// Returns the cache policy for loads that should stay in L2, rather than what is written: a token is read once for each
// of its destinations.
__device__ __forceinline__ uint64_t keep_in_l2() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Returns the cache policy for loads that should leave L2 first, because they are not read again.
__device__ __forceinline__ uint64_t leave_l2() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
template <typename T>
__device__ __forceinline__ Vec<T> load_kept(const void* from, uint64_t policy) {
  Vec<T> v;
  asm("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
      : "l"(from), "l"(policy));
  return v;
}

// Returns a half of a word as `lower` and `upper` do, but with instructions that are used nowhere else. Otherwise the
// compiler would keep the values converted for one copy until it encodes the other, and registers would spill.
template <typename T>
__device__ __forceinline__ float apart(uint32_t two, bool second) {
  if constexpr (std::is_same_v<T, __half>) {
    two ^= gridDim.y - 1;  // grids have only x, so this is 0
    return second ? upper<T>(two) : lower<T>(two);
  }
  uint32_t bits;
  if (second) {
    asm("prmt.b32 %0, %1, 0, 0x3244;" : "=r"(bits) : "r"(two));
  } else {
    asm("prmt.b32 %0, %1, 0, 0x1044;" : "=r"(bits) : "r"(two));
  }
  return float_of(bits);
}

// Thread blocks that an SM should hold. Encoding in software takes more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int kPatchBlocks = 4;
#else
constexpr int kPatchBlocks = 5;
#endif

// The tokens of a warp's rows: `kDown` patches below each other from row `first` on; rows from `end` on do not exist.
// Each lane holds one token and gets others by a shuffle, so warps need not wait for each other before they load.
template <unsigned kDown>
class WarpTokens {
 public:
  __device__ __forceinline__ WarpTokens(const SourceArgs& p, int64_t first, int64_t end) {
    const int64_t row = first + threadIdx.x % (kDown * 8);
    mine_ = row < end ? p.from.at(row) : p.from.none;
  }
  __device__ __forceinline__ bool all(const SourceArgs& p) const { return __all_sync(kAllLanes, mine_ != p.from.none); }
  // Returns the token of row i of this lane's patch. All lanes of the warp call it.
  __device__ __forceinline__ uint32_t operator()(int i) const {
    return __shfl_sync(kAllLanes, mine_, threadIdx.x % 32 / (32 / kDown) * 8 + i);
  }

 private:
  uint32_t mine_;
};

template <typename T>
struct Patch {
  static_assert(sizeof(T) == 2);
  Row8<T> x[8];

  // Loads columns col .. col + 7 of token origin(i) into row i, or zeros if that is p.from.none. kAll: all elements
  // exist.
  template <bool kAll = false, typename Origin>
  __device__ __forceinline__ void gather(const SourceArgs& p, int64_t col, Origin&& origin) {
    const char* base = static_cast<const char*>(p.x.data) + col * sizeof(T);
    const uint32_t pitch = static_cast<uint32_t>(p.cols * sizeof(T));
    const uint64_t kept = keep_in_l2();
    const bool inside = kAll || col < p.k;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t token = origin(i);
      const char* from = row_at(base, token, pitch);
      if (kAll || (inside && token < p.from.none)) x[i].v[0] = load_kept<T>(from, kept);
    }
  }

  // Computes the finite maxima of columns 2 j (lower half) and 2 j + 1. Returns whether a lane of the warp holds a NaN
  // or an infinity.
  __device__ __forceinline__ bool column_maxima(uint32_t (&m)[4]) const {
    columns<false>([](uint32_t a, uint32_t b) { return max_abs_nan2<T>(a, b); }, m);
    const uint32_t all = max_abs_nan2<T>(max_abs_nan2<T>(m[0], m[1]), max_abs_nan2<T>(m[2], m[3]));
    const bool nan = __any_sync(kAllLanes, !finite2<T>(all));
    if (nan) columns<true>([](uint32_t a, uint32_t b) { return max_abs2<T>(a, b); }, m);
    return nan;
  }

  // Computes the finite maxima of rows 2 i (lower half) and 2 i + 1; `nan` is the result of column_maxima.
  __device__ __forceinline__ void row_maxima(bool nan, uint32_t (&m)[4]) const {
    if (nan) {
      rows<true>(m);
    } else {
      rows<false>(m);
    }
  }

  // Returns the eight encoded bytes of column j. kNaN: there may be a NaN or an infinity.
  template <bool kE5M2, bool kNaN>
  __device__ __forceinline__ uint2 encode_column(int j, float scale) const {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = multiply_rn(apart<T>(word<kNaN>(i, j / 2), j % 2), scale);
    return {encode4<kE5M2, kNaN>(y[0], y[1], y[2], y[3]), encode4<kE5M2, kNaN>(y[4], y[5], y[6], y[7])};
  }

 private:
  template <bool kNaN>
  __device__ __forceinline__ uint32_t word(int i, int j) const {
    return kNaN ? without_inf2<T>(x[i].v[0].w[j]) : x[i].v[0].w[j];
  }
  template <bool kNaN>
  __device__ __forceinline__ void rows(uint32_t (&m)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t two[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto w = [&](int j) { return word<kNaN>(2 * i + h, j); };
        two[h] = max_abs2<T>(max_abs2<T>(w(0), w(1)), max_abs2<T>(w(2), w(3)));
      }
      m[i] = max_abs2<T>(__byte_perm(two[0], two[1], 0x5410), __byte_perm(two[0], two[1], 0x7632));
    }
  }

  template <bool kNaN, typename Max>
  __device__ __forceinline__ void columns(Max&& max, uint32_t (&m)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      m[j] = word<kNaN>(0, j);
#pragma unroll
      for (int i = 1; i < 8; ++i) m[j] = max(m[j], word<kNaN>(i, j));
    }
  }
};

// max_and_halve for pairs of 16-bit elements.
template <typename T, int kKeep>
__device__ __forceinline__ void max_and_halve2(uint32_t* v, int lane, int mask) {
  const bool second = lane & mask;
#pragma unroll
  for (int i = 0; i < kKeep; ++i) {
    const uint32_t keep = second ? v[i + kKeep] : v[i], send = second ? v[i] : v[i + kKeep];
    v[i] = max_abs2<T>(keep, __shfl_xor_sync(kAllLanes, send, mask));
  }
}

// The scale codes of two blocks whose maxima are the halves of `two`, and the multipliers of their elements.
template <typename T>
struct Codes {
  uint32_t code[2];
  float inverse[2];

  __device__ __forceinline__ Codes(uint32_t two, float max_reciprocal)
      : code{e8m0_from_amax(max_abs(0.0f, lower<T>(two)), max_reciprocal),
             e8m0_from_amax(max_abs(0.0f, upper<T>(two)), max_reciprocal)},
        inverse{e8m0_reciprocal(code[0]), e8m0_reciprocal(code[1])} {}
};

// The grid takes strips of `across` tile columns one after the other, each from its first row to its last. The part of
// x that a strip reads stays in L2, where every further destination of a token finds it. Strips are at most two tiles
// wide: wider ones leave more partly written lines in L2.
constexpr int64_t kStripBytes = 8 << 20, kMostAcross = 2;

class Strips {
 public:
  Strips() = default;
  // Strips of tiles that are `width` columns wide; `down` tiles down the rows and `along` tiles along them.
  Strips(const SourceArgs& p, int64_t width, int64_t down, int64_t along) {
    const int64_t bytes_of_one = std::max<int64_t>(1, static_cast<int64_t>(p.from.none) * width * 2);
    across_ = static_cast<uint32_t>(std::clamp<int64_t>(kStripBytes / bytes_of_one, 1, std::min(along, kMostAcross)));
    last_ = static_cast<uint32_t>(along / across_);
    const uint32_t rest = static_cast<uint32_t>(along % across_);
    size_ = static_cast<uint32_t>(down) * across_;
    by_size_ = Divider(size_), by_across_ = Divider(across_), by_rest_ = Divider(rest);
    rest_ = rest;
    cols_ = static_cast<uint32_t>(across_ * width), by_lines_ = Divider(cols_ / kLine);
    const int64_t lines = int64_t{p.from.none} * (cols_ / kLine);
    asks_ = p.m < kFetchRows * p.from.none ? 0 : static_cast<uint32_t>(ceil_div(lines, std::max(size_, 1u)));
  }
  __device__ __forceinline__ void place(uint32_t index, uint32_t* tile_m, uint32_t* tile_k) const {
    const uint32_t strip = by_size_(index), inside = index - strip * size_;
    const bool whole = strip < last_;
    *tile_m = whole ? by_across_(inside) : by_rest_(inside);
    *tile_k = strip * across_ + inside - *tile_m * (whole ? across_ : rest_);
  }
  // Prefetches the part of x that the next strip reads into L2, if that pays; each thread block fetches a share.
  __device__ __forceinline__ void fetch_next(const SourceArgs& p) const {
    if (threadIdx.x >= asks_) return;
    const uint32_t strip = by_size_(blockIdx.x), line = (blockIdx.x - strip * size_) * asks_ + threadIdx.x;
    const uint32_t token = by_lines_(line);
    const int64_t col = int64_t{strip + 1} * cols_ + (line - token * (cols_ / kLine)) * kLine;
    if (token >= p.from.none || col >= p.k) return;
    const char* at = static_cast<const char*>(p.x.data) + (token * p.cols + col) * 2;
    asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(at));
  }

 private:
  static constexpr uint32_t kLine = 64;                   // columns of one prefetch
  static constexpr int64_t kFetchRows = 3;                // least rows for each token for which prefetching pays
  uint32_t across_ = 1, last_ = 0, rest_ = 0, size_ = 1;  // rest_: tiles left after `last_` strips
  uint32_t cols_ = 0, asks_ = 0;                          // columns of a strip; prefetches of a thread block
  Divider by_size_, by_across_, by_rest_, by_lines_;
};

// Returns whether kernels with patches take the source: permuted rows of bfloat16 or float16, in whole vectors, with a
// row pitch that fits 32 bits.
inline bool patched(const SourceArgs& p) {
  return p.kind == SourceKind::permuted && p.vec && p.x.type != DType::f32 && p.k < 0x40000000;
}

// Calls f with the type of x.
template <typename F>
Status with_patch_type(const SourceArgs& p, F&& f) {
  return p.x.type == DType::f16 ? f(__half{}) : f(__nv_bfloat16{});
}

// Encodes eight elements of a row, each times its own scale. kNaN: there may be a NaN or an infinity.
template <bool kE5M2, bool kNaN, typename T, typename Scale>
__device__ __forceinline__ uint2 encode_patch_row(const Row8<T>& r, Scale&& scale) {
  if constexpr (kNaN) return encode_row8<kE5M2>(without_inf(r), scale);
  return encode_row8<kE5M2, false>(r, scale);
}

// Encodes the patch at (row, col) times `scale` to q, and stores its rows to `out` [m, k] unless that is null.
template <bool kE5M2, bool kNaN, typename T>
__device__ __forceinline__ void encode_rows(const Patch<T>& patch, uint8_t* out, int64_t m, int64_t k, int64_t row,
                                            int64_t col, uint2 (&q)[8], float scale) {
  const int left = out && col < k ? static_cast<int>(min(m - row, int64_t{8})) : 0;
  uint8_t* to = out + row * k + col;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    q[i] = encode_patch_row<kE5M2, kNaN>(patch.x[i], [&](int) { return scale; });
    uint2* at = reinterpret_cast<uint2*>(row_at(to, i, static_cast<uint32_t>(k)));
    if (i < left) __stcs(at, q[i]);
  }
}

}  // namespace diptych::cuda
