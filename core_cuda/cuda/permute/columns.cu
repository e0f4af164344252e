// permute_columns: out[h, r] = in[h, token of r], with elements of one byte. A thread block holds four rows h in shared
// memory, as a word for each token with one byte of each row, so that one look-up gives four results. Rows that are too
// long for shared memory are read from device memory.
#include "cuda/base/launch.cuh"
#include "cuda/permute/origin.cuh"
#include "cuda/permute/rows.cuh"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kHeight = 4;
constexpr int kMaxShared = 160 << 10;     // sm_80 has 163 KiB
constexpr int64_t kRowsAtOnce = 1 << 15;  // result rows r of one block of the kernel that reads from device memory

struct ColumnParams {
  const uint8_t* in;  // [height, tokens]
  uint8_t* out;       // [height, rows]
  Origins from;
  int64_t height, tokens, rows;
  bool vec_in, vec_out;
};

__global__ void __launch_bounds__(kThreads) columns_kernel(const __grid_constant__ ColumnParams p) {
  DIPTYCH_DYNAMIC_SHARED(raw);
  uint32_t* words = reinterpret_cast<uint32_t*>(raw);  // [tokens + 1], the last one 0
  const int64_t h0 = static_cast<int64_t>(blockIdx.x) * kHeight;
  const int height = static_cast<int>(min(int64_t{kHeight}, p.height - h0));
  const int tokens = static_cast<int>(p.tokens);
  const uint8_t* in = p.in + h0 * p.tokens;
  uint8_t* out = p.out + h0 * p.rows;
  if (p.vec_in) {
    for (int t = threadIdx.x * 4; t < tokens; t += kThreads * 4) {
      uint32_t w[kHeight];
#pragma unroll
      for (int i = 0; i < kHeight; ++i)
        w[i] = i < height ? __ldcs(reinterpret_cast<const unsigned*>(in + i * p.tokens + t)) : 0;
      transpose4x4(w[0], w[1], w[2], w[3]);
      *reinterpret_cast<uint4*>(words + t) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  } else {
    for (int t = threadIdx.x; t < tokens; t += kThreads) {
      uint32_t w = 0;
#pragma unroll
      for (int i = 0; i < kHeight; ++i)
        if (i < height) w |= static_cast<uint32_t>(in[i * p.tokens + t]) << (8 * i);
      words[t] = w;
    }
  }
  if (threadIdx.x == 0) words[tokens] = 0;
  __syncthreads();
  if (p.vec_out) {
#pragma unroll 2
    for (int64_t r = threadIdx.x * 4; r < p.rows; r += kThreads * 4) {
      const int4 entry = __ldg(reinterpret_cast<const int4*>(p.from.row_source + r));
      uint32_t w[kHeight] = {words[p.from.of(entry.x)], words[p.from.of(entry.y)], words[p.from.of(entry.z)],
                             words[p.from.of(entry.w)]};
      transpose4x4(w[0], w[1], w[2], w[3]);
#pragma unroll
      for (int i = 0; i < kHeight; ++i)
        if (i < height) __stcs(reinterpret_cast<unsigned*>(out + i * p.rows + r), w[i]);
    }
  } else {
    for (int64_t r = threadIdx.x; r < p.rows; r += kThreads) {
      const uint32_t w = words[p.from.at(r)];
#pragma unroll
      for (int i = 0; i < kHeight; ++i)
        if (i < height) out[i * p.rows + r] = static_cast<uint8_t>(w >> (8 * i));
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    long_columns_kernel(const __grid_constant__ ColumnParams p, unsigned parts) {
  const int64_t h = blockIdx.x / parts, first = blockIdx.x % parts * kRowsAtOnce;
  const int64_t last = min(p.rows, first + kRowsAtOnce);
  for (int64_t r = first + threadIdx.x; r < last; r += kThreads) {
    const uint32_t t = p.from.at(r);
    p.out[h * p.rows + r] = t < p.tokens ? __ldg(p.in + h * p.tokens + t) : 0;
  }
}

}  // namespace

Status permute_columns(const PermuteColumnsArgs& args, const Execution& exec) {
  ColumnParams p{args.in.as<const uint8_t>(),
                 args.out.as<uint8_t>(),
                 Origins(args.row_source, args.slots, args.in.cols()),
                 args.in.rows(),
                 args.in.cols(),
                 args.row_source.numel(),
                 false,
                 false};
  if (p.height == 0 || p.rows == 0) return {};
  p.vec_in = aligned(p.in, 4) && p.tokens % 4 == 0;
  p.vec_out = aligned(p.out, 4) && aligned(p.from.row_source, 16) && p.rows % 4 == 0;
  const size_t shared = (static_cast<size_t>(p.tokens) + 1) * sizeof(uint32_t);
  if (shared > size_t{kMaxShared}) {
    const int64_t parts = ceil_div(p.rows, kRowsAtOnce);
    return launch("permute_columns", long_columns_kernel, p.height * parts, kThreads, 0, exec.stream, p,
                  static_cast<unsigned>(parts));
  }
  static SharedGrant grant;
  DIPTYCH_TRY(grant.raise(columns_kernel, exec.device.index, kMaxShared));
  return launch("permute_columns", columns_kernel, ceil_div(p.height, kHeight), kThreads, shared, exec.stream, p);
}

}  // namespace diptych::cuda
