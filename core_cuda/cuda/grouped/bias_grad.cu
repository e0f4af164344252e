// out[g, n] = sum over the rows of group g of dy[., n] in float32. Chunks start anew with each group, so that each
// group's sum has the bits that bias_grad gives for its rows alone. The workspace has slots for the most chunks that
// any offsets can make.
#include "cuda/gemm/column_chunks.cuh"
#include "cuda/grouped/walk.cuh"

namespace diptych::cuda {
namespace {

struct Chunks {
  int first, count;  // a group's first chunk among all chunks, and its number of chunks
  int row, row_end;  // the group's rows
};

// Returns the chunks of the first group for which fits(group, its first chunk, their count) holds, or no chunks if
// there is none. All lanes of a warp call it.
template <typename Fits>
__device__ __forceinline__ Chunks find(const Groups& g, int lane, Fits fits) {
  int highest = 0, before = 0;
  for (int base = 0; base < g.count; base += 31) {  // 32 boundaries are 31 groups
    const int begin = boundary(g, base + 1, lane, highest), end = __shfl_down_sync(kAllLanes, begin, 1);
    const bool counts = lane < 31 && base + lane < g.count;
    const int count = counts ? (end - begin + kChunk - 1) / kChunk : 0;
    const int until = before + running_sum(count, lane);
    const unsigned found = __ballot_sync(kAllLanes, counts && fits(base + lane, until - count, count));
    if (found != 0) {
      const int at = __ffs(found) - 1;
      return {__shfl_sync(kAllLanes, until - count, at), __shfl_sync(kAllLanes, count, at),
              __shfl_sync(kAllLanes, begin, at), __shfl_sync(kAllLanes, end, at)};
    }
    before = __shfl_sync(kAllLanes, until, 31);
  }
  return {0, 0, 0, 0};
}

template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    chunk_kernel(const T* __restrict__ dy, Groups groups, int64_t n, unsigned column_blocks, bool vec,
                 float* __restrict__ partial) {
  const int slot = static_cast<int>(blockIdx.x / column_blocks);
  const Chunks c = find(groups, threadIdx.x % 32,
                        [slot](int, int first, int count) { return slot >= first && slot < first + count; });
  if (c.count == 0) return;
  const int row = c.row + (slot - c.first) * kChunk;
  const int64_t col0 = static_cast<int64_t>(blockIdx.x % column_blocks) * 32 * Vec<T>::kCount;
  sum_chunk(dy, row, min(row + kChunk, c.row_end), n, col0, vec, partial + slot * n);
}

template <typename T>
__global__ void __launch_bounds__(kSumThreads) join_kernel(const float* __restrict__ partial, Groups groups, int64_t n,
                                                           unsigned column_blocks, T* __restrict__ out) {
  const int group = static_cast<int>(blockIdx.x / column_blocks);
  const Chunks c = find(groups, threadIdx.x % 32, [group](int g, int, int) { return g == group; });
  join_chunks(partial + c.first * n, c.count, n, static_cast<int64_t>(blockIdx.x % column_blocks) * 32,
              out + group * n);
}

int64_t slots(int64_t rows, int64_t groups) { return groups > 0 ? rows / kChunk + groups : 0; }

}  // namespace

int64_t grouped_bias_grad_workspace_bytes(int64_t rows, int64_t cols, int64_t groups) {
  return slots(rows, groups) * cols * 4;
}

Status grouped_bias_grad(const GroupedBiasGradArgs& args, const Execution& exec) {
  const int64_t rows = args.dy.rows(), n = args.dy.cols(), count = args.offsets.numel() - 1;
  if (n == 0 || count == 0) return {};
  if (rows > 0x7fffffff || slots(rows, count) > 0x7fffffff)
    return {Code::unsupported, "grouped_bias_grad: rows are counted in int32, and dy has " + std::to_string(rows)};
  const Groups groups{args.offsets.as<const int32_t>(), static_cast<int>(count), static_cast<int>(rows)};
  float* partial = args.workspace.as<float>();
  DIPTYCH_TRY(with_float_type(args.dy.dtype, "grouped_bias_grad", [&](auto type) {
    using T = decltype(type);
    const T* dy = args.dy.as<const T>();
    const int64_t column_blocks = ceil_div(n, 32 * Vec<T>::kCount);
    const bool vec = aligned(dy, 16) && n % Vec<T>::kCount == 0;
    return launch("grouped_bias_grad", chunk_kernel<T>, slots(rows, count) * column_blocks, kSumThreads, 0, exec.stream,
                  dy, groups, n, static_cast<unsigned>(column_blocks), vec, partial);
  }));
  return with_float_type(args.out.dtype, "grouped_bias_grad", [&](auto type) {
    using T = decltype(type);
    const int64_t column_blocks = ceil_div(n, 32);
    return launch("grouped_bias_grad", join_kernel<T>, count * column_blocks, kSumThreads, 0, exec.stream,
                  static_cast<const float*>(partial), groups, n, static_cast<unsigned>(column_blocks),
                  args.out.as<T>());
  });
}

}  // namespace diptych::cuda
