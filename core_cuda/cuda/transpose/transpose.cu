// transpose: tiles of 128 x 128 bytes through shared memory, in whole vectors of 16 bytes on both sides.
//
// A thread loads vectors of rows, and stores sixteen rows of a column as one vector, of four columns. In shared memory
// vector v of row r stands in place v ^ (r / 16 % 8) of its row: the lanes of a warp then read the same word of eight
// groups of sixteen rows from different banks.
#include "cuda/base/launch.cuh"
#include "cuda/base/vector.cuh"
#include "diptych/transpose.h"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSide = 128;         // bytes and rows of a tile
constexpr int kVecs = kSide / 16;  // of a row of a tile
constexpr int kWords = kSide / 4;
static_assert(kThreads == kWords * kVecs);

struct TransposeParams {
  const uint8_t* in;                 // [batch, rows, cols]
  uint8_t* out;                      // [batch, cols, rows]
  int64_t rows, cols, down, across;  // down, across: tiles of a matrix
  bool vec_in, vec_out;              // vectors are aligned, and whole
};

__device__ __forceinline__ int place(int row, int vec) { return row * kVecs + (vec ^ (row / 16 % 8)); }

__global__ void __launch_bounds__(kThreads) transpose_kernel(const __grid_constant__ TransposeParams p) {
  DIPTYCH_DYNAMIC_SHARED(raw);
  uint4* tile = reinterpret_cast<uint4*>(raw);
  const int64_t matrix = blockIdx.x / (p.down * p.across), in_matrix = blockIdx.x % (p.down * p.across);
  const int64_t r0 = in_matrix / p.across * kSide, c0 = in_matrix % p.across * kSide;
  const uint8_t* in = p.in + matrix * p.rows * p.cols;
  uint8_t* out = p.out + matrix * p.rows * p.cols;
#pragma unroll
  for (int i = 0; i < kSide * kVecs / kThreads; ++i) {
    const int row = (threadIdx.x + i * kThreads) / kVecs, vec = threadIdx.x % kVecs;
    const int64_t r = r0 + row, c = c0 + vec * 16;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (r < p.rows && c < p.cols) {
      const uint8_t* from = in + r * p.cols + c;
      if (p.vec_in) {
        v = __ldg(reinterpret_cast<const uint4*>(from));
      } else {
        uint32_t w[4] = {0, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < 16; ++j)
          if (c + j < p.cols) w[j / 4] |= static_cast<uint32_t>(from[j]) << (j % 4 * 8);
        v = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
    tile[place(row, vec)] = v;
  }
  __syncthreads();
  const int group = threadIdx.x % kVecs, word = threadIdx.x / kVecs;  // rows 16 group ..., columns 4 word ...
  const uint32_t* words = reinterpret_cast<const uint32_t*>(tile);
  uint32_t w[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) w[i] = words[place(group * 16 + i, word / 4) * 4 + word % 4];
#pragma unroll
  for (int i = 0; i < 16; i += 4) transpose4x4(w[i], w[i + 1], w[i + 2], w[i + 3]);
  const int64_t r = r0 + group * 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int64_t c = c0 + word * 4 + j;
    if (c >= p.cols || r >= p.rows) continue;
    uint8_t* to = out + c * p.rows + r;
    if (p.vec_out) {
      *reinterpret_cast<uint4*>(to) = make_uint4(w[j], w[j + 4], w[j + 8], w[j + 12]);
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (r + i < p.rows) to[i] = static_cast<uint8_t>(w[i / 4 * 4 + j] >> (i % 4 * 8));
    }
  }
}

}  // namespace

Status transpose(const TransposeArgs& a, const Execution& exec) {
  if (a.in.numel() == 0) return {};
  TransposeParams p{a.in.as<const uint8_t>(), a.out.as<uint8_t>(), a.in.shape[a.in.rank - 2], a.in.cols()};
  p.down = ceil_div(p.rows, kSide), p.across = ceil_div(p.cols, kSide);
  p.vec_in = aligned(p.in, 16) && p.cols % 16 == 0;
  p.vec_out = aligned(p.out, 16) && p.rows % 16 == 0;
  const int64_t matrices = a.in.numel() / (p.rows * p.cols);
  return launch("transpose", transpose_kernel, matrices * p.down * p.across, kThreads, kSide * kSide, exec.stream, p);
}

}  // namespace diptych::cuda
