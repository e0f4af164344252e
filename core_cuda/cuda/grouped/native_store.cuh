// The native kernel's end of a tile: sums in registers to D, 16 bytes a thread.
//
// A thread of the product holds columns 2 q and 2 q + 1 (q = lane % 4) of each 8-column piece. Four neighbouring lanes
// exchange what they hold, so that each stores whole 16 bytes and a row's sectors fill.
#pragma once

#include "cuda/gemm/epilogue.cuh"
#include "cuda/grouped/native_walk.cuh"

namespace diptych::cuda {

// w[i] of lane q becomes w[q] of lane i, among each four lanes.
__device__ __forceinline__ void exchange4(uint32_t (&w)[4], int q) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(kAllLanes, q & 1 ? w[i] : w[i + 1], 1);
    if (q & 1) {
      w[i] = got;
    } else {
      w[i + 1] = got;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(kAllLanes, q & 2 ? w[i] : w[i + 2], 2);
    if (q & 2) {
      w[i] = got;
    } else {
      w[i + 2] = got;
    }
  }
}

// One output tile's common part: r = alpha * (sum * factor); r = r + bias; r = r + beta * C (NUMERICS 7).
struct Finish {
  float alpha, factor, beta;
  const void* c;     // null: none
  const void* bias;  // of this group, or null
  DType bias_type;
};

__device__ __forceinline__ Finish make_finish(const NativeArgs& p, const Tile& t, float factor) {
  Finish f{t.blocks() ? p.alpha : 0.0f, factor, p.beta, p.c, nullptr, p.bias_type};
  if (p.bias && t.group >= 0) {
    f.bias =
        static_cast<const char*>(p.bias) + static_cast<int64_t>(t.group) * p.n * (p.bias_type == DType::f32 ? 4 : 2);
  }
  return f;
}

// Two 16-bit elements or two float32.
template <bool kWide>
__device__ __forceinline__ float2 load_pair(const char* p, bool half) {
  if constexpr (kWide) {
    return *reinterpret_cast<const float2*>(p);
  } else {
    const uint32_t u = *reinterpret_cast<const uint32_t*>(p);
    if (!half) return make_float2(float_of(u << 16), float_of(u & 0xffff0000));
    __half2 h;
    memcpy(&h, &u, sizeof(u));
    return __half22float2(h);
  }
}

// sums[i]: 64 x 128, of which this thread's first row lies `row` + 128 i below the tile's, the other eight below that.
template <bool kWide>
__device__ __forceinline__ void store_tile(const NativeArgs& p, const Finish& f, float (&sums)[2][64], const Tile& t,
                                           int row, int lane) {
  constexpr int kBytes = kWide ? 4 : 2, kPieces = kWide ? 2 : 4;  // pieces of 8 columns, exchanged together
  const int q = lane % 4;
  const bool half = p.d_type == DType::f16;
  // Where this thread stores: 16 bytes of one piece; and what it holds before the exchange: two columns of each.
  const int mine = kWide ? (q & 1) * 8 + (q & 2) * 2 : q * 8;
  bool exists[4];
  int64_t at[4];  // bytes to the tile's first column of each of this thread's rows
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const int r = t.row + row + part / 2 * 128 + part % 2 * 8;
    exists[part] = r < t.row_end;
    at[part] = ((t.d_row + r) * p.n + t.col) * kBytes;
  }
  const int columns = p.n - t.col;
#pragma unroll
  for (int j = 0; j < 16; j += kPieces) {
    float2 bias[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int col = (j + i) * 8 + 2 * q;
      bias[i] = make_float2(0.0f, 0.0f);
      if (f.bias && col < columns) {
        bias[i].x = load_as_float(f.bias, f.bias_type, t.col + col);
        bias[i].y = load_as_float(f.bias, f.bias_type, t.col + col + 1);
      }
    }
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      float2 r[kPieces];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const float* sum = sums[part / 2] + (j + i) * 4 + part % 2 * 2;
        r[i] = make_float2(__fmul_rn(f.alpha, __fmul_rn(sum[0], f.factor)),
                           __fmul_rn(f.alpha, __fmul_rn(sum[1], f.factor)));
      }
      if (f.bias) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          r[i] = make_float2(__fadd_rn(r[i].x, bias[i].x), __fadd_rn(r[i].y, bias[i].y));
      }
      if (f.c) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const int col = (j + i) * 8 + 2 * q;
          if (!exists[part] || col >= columns) continue;
          const float2 c = load_pair<kWide>(static_cast<const char*>(f.c) + at[part] + col * kBytes, half);
          r[i] = make_float2(__fadd_rn(r[i].x, __fmul_rn(f.beta, c.x)), __fadd_rn(r[i].y, __fmul_rn(f.beta, c.y)));
        }
      }
      uint32_t w[4];
      if constexpr (kWide) {  // two lanes: columns 0..3 or 4..7 of one piece each
        const float2 give = q & 1 ? r[0] : r[1], keep = q & 1 ? r[1] : r[0];
        const float2 got = make_float2(__shfl_xor_sync(kAllLanes, give.x, 1), __shfl_xor_sync(kAllLanes, give.y, 1));
        const float2 lo = q & 1 ? got : keep, hi = q & 1 ? keep : got;
        w[0] = bits_of(lo.x), w[1] = bits_of(lo.y), w[2] = bits_of(hi.x), w[3] = bits_of(hi.y);
      } else {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          w[i] = half ? pack2<__half>(r[i].x, r[i].y) : pack2<__nv_bfloat16>(r[i].x, r[i].y);
        exchange4(w, q);
      }
      if (exists[part] && j * 8 + mine < columns) {
        *reinterpret_cast<uint4*>(static_cast<char*>(p.d) + at[part] + (j * 8 + mine) * kBytes) =
            make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
}

}  // namespace diptych::cuda
