// One operand of the emulated GEMM: loads 128 outer indices x 64 k of FP8 or E2M1 and stores them as bfloat16 in shared
// memory.
//
// Shared memory holds [outer][k], 128 bytes a row, whatever the layout in memory; chunk c (8 elements, 16 bytes) of
// row r lies at c ^ (r % 8) ^ (r / 8 % 8), so that neither ldmatrix nor the writers have bank conflicts.
#pragma once

#include "cuda/base/e2m1.cuh"
#include "cuda/base/vector.cuh"
#include "cuda/gemm/operand.h"

namespace diptych::cuda {

constexpr int kTileBytes = kTileOuter * kTileK * 2;
constexpr int kFragments = kTileOuter * kTileK / 32;  // fragments of 32 elements, divided among the threads

__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7) ^ (row >> 3 & 7)) << 4);
}

// Fragment t of a tile, in registers between its load and its store. Layout [outer, k]: w[0..3] hold 16 k of row t / 4,
// w[4..7] those of row t / 4 + 64, and `code` has a scale for each row. E2M1 fills only the first half of each four
// words. Layout [k, outer]: four k of eight outer indices; each pair of words holds one k, and `code` has a byte for
// each outer index.
struct Fragment {
  uint32_t w[8];
  uint32_t code[2];
};

__device__ __forceinline__ int64_t scale_index(const Operand& o, int outer, int k) {
  return (outer >> o.outer_shift) * o.scale_stride_outer + (k >> o.k_shift) * o.scale_stride_k;
}

__device__ __forceinline__ uint32_t load_code(const Operand& o, int outer, int k) {
  if (o.kind == ScaleKind::tensor || o.kind == ScaleKind::block || outer >= o.outer || k >= o.k) {
    return o.kind == ScaleKind::e4m3 ? 0x38 : 127;  // the code of 1
  }
  return __ldg(static_cast<const uint8_t*>(o.scale) + scale_index(o, outer, k));
}

// Loads kCount bytes at p into w, which holds zeros. Only the first `valid` bytes exist; the others stay 0.
template <int kCount>
__device__ __forceinline__ void load_bytes(uint32_t* w, const uint8_t* p, int valid) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < valid) w[i / 4] |= static_cast<uint32_t>(__ldg(p + i)) << (i % 4 * 8);
  }
}

template <Layout kLayout>
__device__ __forceinline__ bool is_k_major(const Operand& o) {
  return kLayout == Layout::either ? o.k_major : kLayout == Layout::k_outer;
}

// The range of k that a confined product sums over. Elements outside of it are replaced by zeros, and scales without an
// element in it by ones, because they may be NaN.
struct Reach {
  int begin, end;
};

// Loads fragment t of the tile at outer0 and k0. With kConfined, fragments of layout [outer, k] still need `confine`.
template <Layout kLayout, bool kConfined>
__device__ __forceinline__ Fragment load_fragment(const Operand& o, int outer0, int k0, int t, const Reach& reach) {
  Fragment f = {};
  if (!is_k_major<kLayout>(o)) {
    const int k = k0 + t % 4 * 16;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int outer = outer0 + t / 4 + h * 64;
      f.code[h] = load_code(o, outer, k);
      if (outer >= o.outer || k >= o.k) continue;
      const int64_t at = static_cast<int64_t>(outer) * o.k + k;
      if (o.element == DType::e2m1) {
        const uint8_t* p = o.data + at / 2;  // k is a multiple of 16
        if (kLayout != Layout::either || o.vec) {
          const uint2 u = __ldg(reinterpret_cast<const uint2*>(p));
          f.w[4 * h] = u.x, f.w[4 * h + 1] = u.y;
        } else {
          load_bytes<8>(f.w + 4 * h, p, 8);
        }
        continue;
      }
      const uint8_t* p = o.data + at;
      if (kLayout != Layout::either || o.vec) {
        const uint4 u = __ldg(reinterpret_cast<const uint4*>(p));
        f.w[4 * h] = u.x, f.w[4 * h + 1] = u.y, f.w[4 * h + 2] = u.z, f.w[4 * h + 3] = u.w;
      } else {
        load_bytes<16>(f.w + 4 * h, p, o.k - k);
      }
    }
    return f;
  }
  const int outer = outer0 + (t % 8 + t / 128 * 8) * 8, k = k0 + t / 8 % 16 * 4;
  const int k_end = kConfined ? reach.end : o.k;
  const bool some = k < k_end && (!kConfined || k + 4 > reach.begin);
  const uint8_t* p = o.data + static_cast<int64_t>(k) * o.outer + outer;
#pragma unroll
  for (int i = 0; i < 4; ++i, p += o.outer) {
    if (outer >= o.outer || k + i >= k_end || (kConfined && k + i < reach.begin)) continue;
    if (kLayout != Layout::either || o.vec) {
      const uint2 u = __ldg(reinterpret_cast<const uint2*>(p));
      f.w[2 * i] = u.x, f.w[2 * i + 1] = u.y;
    } else {
      load_bytes<8>(f.w + 2 * i, p, o.outer - outer);
    }
  }
  if (kLayout != Layout::either || o.vec) {
    f.code[0] = f.code[1] = 0x7f7f7f7f;  // ones
    if (o.kind == ScaleKind::e8m0 && outer < o.outer && some) {
      const uint8_t* code = static_cast<const uint8_t*>(o.scale) + scale_index(o, outer, k);
      const uint2 u = __ldg(reinterpret_cast<const uint2*>(code));
      f.code[0] = u.x, f.code[1] = u.y;
    }
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) f.code[j / 4] |= (some ? load_code(o, outer + j, k) : 127) << (j % 4 * 8);
  }
  return f;
}

// Returns the mask of a word's elements begin .. end - 1, each of which is kBits wide.
template <int kBits>
__device__ __forceinline__ uint32_t elements(int begin, int end) {
  const auto below = [](int n) { return n >= 32 / kBits ? ~0u : n <= 0 ? 0u : (1u << n * kBits) - 1; };
  return below(end) & ~below(begin);
}

// Clears the elements of fragment t outside of `reach`, in a tile that `reach` cuts.
template <Layout kLayout>
__device__ __forceinline__ void confine(const Operand& o, Fragment& f, int k0, int t, const Reach& reach) {
  if (is_k_major<kLayout>(o)) return;  // load_fragment has done so
  const int lo = reach.begin - (k0 + t % 4 * 16), hi = reach.end - (k0 + t % 4 * 16);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    f.w[i] &= o.element == DType::e2m1 ? elements<4>(lo - i % 4 * 8, hi - i % 4 * 8)
                                       : elements<8>(lo - i % 4 * 4, hi - i % 4 * 4);
  }
  if (lo >= 16 || hi <= 0) f.code[0] = f.code[1] = o.kind == ScaleKind::e4m3 ? 0x38 : 127;
}

// Four FP8 bytes times a scale -> bfloat16. The float32 product is exact (or inf), so there is one rounding.
template <bool kE5M2>
__device__ __forceinline__ uint2 decode_bf16(uint32_t four, float scale) {
  const float2 lo = decode2<kE5M2>(four & 0xffff), hi = decode2<kE5M2>(four >> 16);
  return make_uint2(pack2<__nv_bfloat16>(lo.x * scale, lo.y * scale), pack2<__nv_bfloat16>(hi.x * scale, hi.y * scale));
}

// Multiplies two pairs of bfloat16. Both products are exact: E2M1 times an E4M3 scale has at most six significant bits.
__device__ __forceinline__ uint32_t scale_bf16x2(uint32_t pair, uint32_t factor) {
  __nv_bfloat162 x, y;
  memcpy(&x, &pair, sizeof(pair)), memcpy(&y, &factor, sizeof(factor));
  x = __hmul2(x, y);
  memcpy(&pair, &x, sizeof(pair));
  return pair;
}

// Eight E2M1 codes times a scale, which `scale` holds twice -> bfloat16.
__device__ __forceinline__ uint4 decode_bf16_e2m1(uint32_t eight, uint32_t scale) {
  constexpr uint32_t kRaise = 0x7e807e80;  // 2^126
  uint32_t v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = scale_bf16x2(scale_bf16x2(e2m1_pair_bits(eight >> (8 * i) & 0xff), kRaise), scale);
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ void decode_fragment_e2m1(const Fragment& f, unsigned char* tile, int t) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float scale = decode2<false>(f.code[h]).x;
    const uint32_t both = pack2<__nv_bfloat16>(scale, scale);  // exact
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      *reinterpret_cast<uint4*>(tile + swizzled(t / 4 + h * 64, t % 4 * 2 + c)) =
          decode_bf16_e2m1(f.w[4 * h + c], both);
    }
  }
}

template <Layout kLayout, bool kE5M2>
__device__ __forceinline__ void decode_fragment(const Operand& o, Fragment& f, unsigned char* tile, int t) {
  if (!is_k_major<kLayout>(o)) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = e8m0_to_float(f.code[h]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint2 a = decode_bf16<kE5M2>(f.w[4 * h + 2 * c], scale);
        const uint2 b = decode_bf16<kE5M2>(f.w[4 * h + 2 * c + 1], scale);
        *reinterpret_cast<uint4*>(tile + swizzled(t / 4 + h * 64, t % 4 * 2 + c)) = make_uint4(a.x, a.y, b.x, b.y);
      }
    }
    return;
  }
  transpose4x4(f.w[0], f.w[2], f.w[4], f.w[6]);  // outer 0..3: four k of one outer index in each word
  transpose4x4(f.w[1], f.w[3], f.w[5], f.w[7]);  // outer 4..7
  const int outer = (t % 8 + t / 128 * 8) * 8, group = t / 8 % 16;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float scale = e8m0_to_float(f.code[j / 4] >> (j % 4 * 8) & 0xff);
    *reinterpret_cast<uint2*>(tile + swizzled(outer + j, group / 2) + group % 2 * 8) =
        decode_bf16<kE5M2>(f.w[j % 4 * 2 + j / 4], scale);
  }
}

template <Layout kLayout>
__device__ __forceinline__ void store_fragment(const Operand& o, Fragment& f, unsigned char* tile, int t) {
  if (kLayout != Layout::k_outer && o.element == DType::e2m1) {  // E2M1 is never [k, outer]
    decode_fragment_e2m1(f, tile, t);
  } else if (o.element == DType::e5m2) {
    decode_fragment<kLayout, true>(o, f, tile, t);
  } else {
    decode_fragment<kLayout, false>(o, f, tile, t);
  }
}

// Returns the float32 scale that a partial sum takes from this operand at (outer, k).
__device__ __forceinline__ float partial_scale(const Operand& o, int outer, int k) {
  if (o.kind == ScaleKind::e8m0 || o.kind == ScaleKind::e4m3) return 1.0f;
  if (o.kind == ScaleKind::tensor) return __ldg(static_cast<const float*>(o.scale));
  return outer < o.outer ? __ldg(static_cast<const float*>(o.scale) + scale_index(o, outer, k)) : 0.0f;
}

}  // namespace diptych::cuda
