// The end of a tile in the native kernel: sums go from registers to D.
#pragma once

#include "cuda/gemm/epilogue.cuh"
#include "cuda/products/sm90_walk.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tensor_copy.cuh"

namespace diptych::cuda {

constexpr int kGroupThreads = 128;  // threads of a warpgroup

// The parameters of one tile's epilogue: r = alpha * (sum * factor); r = r + bias; r = r + beta * C (NUMERICS 7).
struct Finish {
  float alpha, factor, beta;
  const void* bias;  // the group's bias, or null
  DType bias_type;
};

__device__ __forceinline__ Finish make_finish(const NativeArgs& p, const Tile& t, float factor) {
  Finish f{t.blocks() ? p.alpha : 0.0f, factor, p.beta, nullptr, p.bias_type};
  if (p.bias && t.group >= 0) {
    f.bias = static_cast<const char*>(p.bias) +
             static_cast<int64_t>(t.group) * p.d_pitch * (p.bias_type == DType::f32 ? 4 : 2);
  }
  return f;
}

// Returns the tile's epilogue with amaxes, in the form that emulated products use.
__device__ __forceinline__ Epilogue make_epilogue(const NativeArgs& p, const Tile& t, const Finish& f) {
  const bool sums = t.blocks() > 0;  // an empty sum is +0, whatever the amaxes are
  Epilogue e{};
  e.d = p.d, e.c = p.c, e.bias = f.bias;
  e.m = t.d_row + t.row_end, e.n = p.n, e.pitch = p.d_pitch, e.alpha = f.alpha, e.beta = p.c ? p.beta : 0.0f;
  if (sums && p.a_amax) e.a_amax = {p.a_amax - t.d_row * p.a_amax_step, p.a_amax_step};
  if (sums && p.b_amax) e.b_amax = {p.b_amax + (p.depth ? 0 : t.group * p.b_amax_stack), p.b_amax_step};
  e.d_type = p.d_type, e.bias_type = p.bias_type;
  return e;
}

// Stores a warpgroup's 64 rows, which begin `first` below the tile's, by single elements.
template <int kSums>
__device__ __forceinline__ void store_pieces(const Epilogue& e, const Tile& t, float factor, const float (&sums)[kSums],
                                             int first) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  const int64_t row = t.d_row + t.row + first + warp * 16 + lane / 4;
  float of_row[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) of_row[h] = row + h * 8 < e.m ? row_alpha(e, row + h * 8) : 0.0f;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    const int64_t col = t.col + j * 8 + lane % 4 * 2;
    float bias[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (e.bias && col + i < e.n) bias[i] = load_as_float(e.bias, e.bias_type, col + i);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* sum = sums + j * 4 + h * 2;
      finish_pair(e, row + h * 8, col, of_row[h], __fmul_rn(sum[0], factor), __fmul_rn(sum[1], factor), bias[0],
                  bias[1]);
    }
  }
}

// Two 16-bit elements of either type.
__device__ __forceinline__ float2 unpack_pair(uint32_t u, bool half) {
  if (!half) return make_float2(float_of(u << 16), float_of(u & 0xffff0000));
  __half2 h;
  memcpy(&h, &u, sizeof(u));
  return __half22float2(h);
}
__device__ __forceinline__ uint32_t pack_pair(float2 r, bool half) {
  return half ? pack2<__half>(r.x, r.y) : pack2<__nv_bfloat16>(r.x, r.y);
}

// The steps of an epilogue that a tile needs; the caller tests that once for a tile, since branches cost more than they
// save. plain: alpha is 1. more: there may be a bias or C.
enum class Steps { plain, alpha, more };

// Returns the finished elements of D in columns col (even) and col + 1. `c`: C's elements there, if there is a C.
// kFactor: multiplies by the scales.
template <bool kFactor, Steps kSteps>
__device__ __forceinline__ float2 finish_pair(const NativeArgs& p, const Finish& f, const float* sum, int col,
                                              float2 c) {
  constexpr bool kMore = kSteps == Steps::more;
  float2 r = make_float2(sum[0], sum[1]);
  if (kFactor) r = make_float2(__fmul_rn(r.x, f.factor), __fmul_rn(r.y, f.factor));
  if (kSteps != Steps::plain) r = make_float2(__fmul_rn(f.alpha, r.x), __fmul_rn(f.alpha, r.y));
  if (kMore && f.bias && col < p.n) {
    r.x = __fadd_rn(r.x, load_as_float(f.bias, f.bias_type, col));
    r.y = __fadd_rn(r.y, load_as_float(f.bias, f.bias_type, col + 1));
  }
  if (kMore && p.c) r = make_float2(__fadd_rn(r.x, __fmul_rn(f.beta, c.x)), __fadd_rn(r.y, __fmul_rn(f.beta, c.y)));
  return r;
}

// Stores a warpgroup's 64 rows of float32, which begin `first` below the tile's, by pairs.
template <bool kMore, int kSums>
__device__ __forceinline__ void store_floats(const NativeArgs& p, const Tile& t, const Finish& f,
                                             const float (&sums)[kSums], int first) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  const int row = t.row + first + warp * 16 + lane / 4, col0 = t.col + lane % 4 * 2;
  float* d = static_cast<float*>(p.d) + (t.d_row + row) * p.d_pitch + col0;
  const float* c = static_cast<const float*>(p.c) + (t.d_row + row) * p.d_pitch + col0;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    if (col0 + j * 8 >= p.n) break;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + h * 8 >= t.row_end) break;
      const int64_t at = h * 8 * static_cast<int64_t>(p.d_pitch) + j * 8;
      float2 before = make_float2(0.0f, 0.0f);
      if (kMore && p.c) before = *reinterpret_cast<const float2*>(c + at);
      *reinterpret_cast<float2*>(d + at) =
          finish_pair<true, kMore ? Steps::more : Steps::alpha>(p, f, sums + j * 4 + h * 2, col0 + j * 8, before);
    }
  }
}

// Returns where byte `at` of row `row` lies among rows of 128 bytes with the tensor maps' swizzle.
__device__ __forceinline__ int swizzled_byte(int row, int at) {
  return row * 128 + ((at / 16) ^ (row % 8)) * 16 + at % 16;
}

// Stores a warpgroup's 64 rows of a tile, which begin `first` rows below the tile's first. All threads of the warpgroup
// call begin before the sums are computed, then store.
template <bool kWide, bool kFactor, int kTileN>
struct Out;

// 16-bit elements: a warpgroup lays out its 64 rows in shared memory, in boxes of 64 columns. The copy engine stores
// them to D while the next tile is multiplied; where rows of another group follow among the 64, each warp stores its 16
// rows. Tiles of 256 columns leave memory for one box alone, which the warps store.
template <bool kFactor, int kTileN>
struct Out<false, kFactor, kTileN> {
  static constexpr int kBoxes = kTileN / 64, kBoxBytes = 64 * 128, kWarpBytes = kBoxBytes / 4;
  static constexpr bool kEngine = kTileN < 256;
  static constexpr int kAtOnce = kEngine ? kBoxes : 1, kBytes = kAtOnce * kBoxBytes;

  unsigned char* memory;
  int group;

  __device__ __forceinline__ Out(unsigned char* memory_, uint64_t*, int group_) : memory(memory_), group(group_) {}
  __device__ __forceinline__ void begin(const NativeArgs&, const Tile&, int) const {}
  // Waits until the copy engine has read shared memory, which ends with the thread block.
  __device__ __forceinline__ void end() const { ptx::bulk_wait_read(); }

  __device__ __forceinline__ void store(const NativeArgs& p, const Finish& f, const float (&sums)[kTileN / 2],
                                        const Tile& t, int first) {
    if (f.bias || p.c) {
      turn<Steps::more, false>(p, f, sums, t, first);
    } else if (f.alpha == 1.0f && p.d_type == DType::bf16) {
      turn<Steps::plain, true>(p, f, sums, t, first);
    } else {
      turn<Steps::alpha, false>(p, f, sums, t, first);
    }
  }

 private:
  __device__ __forceinline__ void sync() const { ptx::named_sync(1 + group, kGroupThreads); }

  // kBfloat16: D's type is known, which saves instructions.
  template <Steps kSteps, bool kBfloat16>
  __device__ __forceinline__ void turn(const NativeArgs& p, const Finish& f, const float (&sums)[kTileN / 2],
                                       const Tile& t, int first) {
    const bool half = !kBfloat16 && p.d_type == DType::f16, leads = threadIdx.x % kGroupThreads == 0;
    const bool whole = kEngine && (p.depth || t.row + first + 64 <= t.row_end);
    if constexpr (kEngine) {
      if (leads) ptx::bulk_wait_read();
      sync();
    }
#pragma unroll
    for (int box = 0; box < kBoxes; box += kAtOnce) {
      lay_out<kSteps>(p, f, sums, t, first, box, half);
      if (whole) {
        ptx::bulk_sees_stores();
        sync();
        if (!leads) continue;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          ptx::store_box(&p.d_map, memory + i * kBoxBytes, (t.col + i * 64) * 2, t.row + first, p.depth ? t.group : 0);
        }
        ptx::bulk_commit();
      } else {
        __syncwarp();
        store_lines(p, t, first, box);
        __syncwarp();
      }
    }
  }

  // Writes the boxes from `box` on to shared memory.
  template <Steps kSteps>
  __device__ __forceinline__ void lay_out(const NativeArgs& p, const Finish& f, const float (&sums)[kTileN / 2],
                                          const Tile& t, int first, int box, bool half) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32, q = lane % 4;
    const int row0 = t.row + first + warp * 16;  // the warp's first row
    const uint16_t* c = static_cast<const uint16_t*>(p.c) + (t.d_row + row0) * p.d_pitch + t.col;
#pragma unroll
    for (int j = box * 8; j < (box + kAtOnce) * 8; j += 2) {
      uint32_t w[4];  // rows 0 .. 7 and 8 .. 15 of one piece of 8 columns, and of the next
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int piece = j + m / 2, col = piece * 8 + 2 * q, r = lane / 4 + m % 2 * 8;
        float2 before = make_float2(0.0f, 0.0f);
        if (kSteps == Steps::more && p.c && row0 + r < t.row_end && t.col + col < p.n) {
          before = unpack_pair(*reinterpret_cast<const uint32_t*>(c + static_cast<int64_t>(r) * p.d_pitch + col), half);
        }
        w[m] = pack_pair(finish_pair<kFactor, kSteps>(p, f, sums + piece * 4 + m % 2 * 2, t.col + col, before), half);
      }
      // Lane l gives the address of row l % 8 of matrix l / 8.
      ptx::stmatrix_x4(
          memory + (j / 8 - box) * kBoxBytes + warp * kWarpBytes + swizzled_byte(lane % 16, (j % 8 + lane / 16) * 16),
          w);
    }
  }

  __device__ __forceinline__ void store_lines(const NativeArgs& p, const Tile& t, int first, int box) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
    const int row0 = t.row + first + warp * 16;
    uint16_t* d = static_cast<uint16_t*>(p.d) + (t.d_row + row0) * p.d_pitch + t.col;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i * 4 + lane / 8, col = box * 64 + lane % 8 * 8;
      if (row0 + r >= t.row_end) break;
      uint16_t* line = d + static_cast<int64_t>(r) * p.d_pitch + col;
#pragma unroll
      for (int side = 0; side < kAtOnce; ++side) {
        const uint4 v = *reinterpret_cast<const uint4*>(memory + side * kBoxBytes + warp * kWarpBytes +
                                                        swizzled_byte(r, lane % 8 * 16));
        if (t.col + col + side * 64 < p.n) *reinterpret_cast<uint4*>(line + side * 64) = v;
      }
    }
  }
};

// float32: shared memory holds half of the columns, in boxes of 32. The copy engine stores them to D, the second half
// while the next tile is multiplied. It also loads C, the first half before it is needed.
template <bool kFactor, int kTileN>
struct Out<true, kFactor, kTileN> {
  static constexpr int kBoxBytes = 64 * 128, kBoxes = kTileN / 64, kBytes = kBoxes * kBoxBytes;

  unsigned char* memory;
  uint64_t* c_there;
  int group;
  uint32_t c_parity = 0;

  __device__ __forceinline__ Out(unsigned char* memory_, uint64_t* c_there_, int group_)
      : memory(memory_), c_there(c_there_), group(group_) {}

  __device__ __forceinline__ void sync() const { ptx::named_sync(1 + group, kGroupThreads); }
  __device__ __forceinline__ static bool leads() { return threadIdx.x % kGroupThreads == 0; }
  // Waits until the copy engine has read shared memory, which ends with the thread block.
  __device__ __forceinline__ void end() const { ptx::bulk_wait_read(); }

  // Waits until the copy engine has read what was stored before, so that the memory is free again.
  __device__ __forceinline__ void reclaim() const {
    if (leads()) ptx::bulk_wait_read();
    sync();
  }
  __device__ __forceinline__ void ask_for_c(const NativeArgs& p, int col, int row, int group) const {
    if (!leads()) return;
    ptx::barrier_arrive_expect(c_there, kBytes);
#pragma unroll
    for (int b = 0; b < kBoxes; ++b) {
      ptx::copy_box(memory + b * kBoxBytes, &p.c_map, c_there, col * 4 + b * 128, row, p.depth ? group : 0);
    }
  }
  __device__ __forceinline__ void begin(const NativeArgs& p, const Tile& t, int first) const {
    if (p.c == nullptr) return;
    reclaim();
    ask_for_c(p, t.col, t.row + first, t.group);
  }

  __device__ __forceinline__ void store(const NativeArgs& p, const Finish& f, const float (&sums)[kTileN / 2],
                                        const Tile& t, int first) {
    const int y = t.row + first;
    const bool whole = p.depth || y + 64 <= t.row_end;  // else rows of another group follow among the 64
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int col = t.col + half * kColumns;
      if (p.c == nullptr || half > 0) reclaim();
      if (p.c) {
        if (half > 0) ask_for_c(p, col, y, t.group);
        ptx::barrier_wait(c_there, c_parity);
        c_parity ^= 1;
      }
      if (f.bias || p.c) {
        lay_out<Steps::more>(p, f, sums + half * (kColumns / 2), col);
      } else {
        lay_out<Steps::alpha>(p, f, sums + half * (kColumns / 2), col);
      }
      ptx::bulk_sees_stores();
      sync();
      if (!whole) {
        copy_rows(p, col, y, t.row_end);
      } else if (leads()) {
#pragma unroll
        for (int b = 0; b < kBoxes; ++b) {
          ptx::store_box(&p.d_map, memory + b * kBoxBytes, col * 4 + b * 128, y, p.depth ? t.group : 0);
        }
        ptx::bulk_commit();
      }
    }
  }

 private:
  static constexpr int kColumns = kTileN / 2;

  __device__ __forceinline__ void copy_rows(const NativeArgs& p, int first_col, int y, int end) const {
    float* d = static_cast<float*>(p.d) + static_cast<int64_t>(y) * p.d_pitch + first_col;
    for (int i = threadIdx.x % kGroupThreads; i < 64 * kColumns / 4; i += kGroupThreads) {
      const int r = i / (kColumns / 4), col = i % (kColumns / 4) * 4;
      if (y + r < end && first_col + col < p.n) {
        *reinterpret_cast<uint4*>(d + static_cast<int64_t>(r) * p.d_pitch + col) =
            *reinterpret_cast<const uint4*>(memory + col / 32 * kBoxBytes + swizzled_byte(r, col % 32 * 4));
      }
    }
  }

  template <Steps kSteps>
  __device__ __forceinline__ void lay_out(const NativeArgs& p, const Finish& f, const float* sums,
                                          int first_col) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % kGroupThreads / 32 * 16 + lane / 4, q = lane % 4;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float2* to =
            reinterpret_cast<float2*>(memory + j / 4 * kBoxBytes + swizzled_byte(row + h * 8, j % 4 * 32 + q * 8));
        const float2 before = kSteps == Steps::more && p.c ? *to : make_float2(0.0f, 0.0f);
        *to = finish_pair<kFactor, kSteps>(p, f, sums + j * 4 + h * 2, first_col + j * 8 + 2 * q, before);
      }
    }
  }
};

}  // namespace diptych::cuda
