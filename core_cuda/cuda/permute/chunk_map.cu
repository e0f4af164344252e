// chunk_map: the map of whole chunks into another order. Each thread block computes where all chunks start, and finds
// the chunks of its rows by binary search.
#include "cuda/base/launch.cuh"
#include "cuda/permute/scan.cuh"
#include "diptych/format.h"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnnamed = 0x7fffffff;

__global__ void __launch_bounds__(kThreads)
    chunk_map_kernel(const int* __restrict__ sizes, const int* __restrict__ order, int chunks, int tokens,
                     int* __restrict__ row_id_map, int* __restrict__ row_source) {
  DIPTYCH_DYNAMIC_SHARED(raw);
  int* start = reinterpret_cast<int*>(raw);  // [chunks + 1] first source row of each chunk; then the last one's end
  int* place = start + chunks + 1;           // [chunks] first place of each chunk in the order
  int* to = place + chunks;                  // [chunks] first destination row of each place
  for (int c = threadIdx.x; c < chunks; c += kThreads) {
    place[c] = kUnnamed;
    start[c] = max(0, min(tokens, sizes[c]));
  }
  __syncthreads();
  for (int j = threadIdx.x; j < chunks; j += kThreads) {
    const int c = order[j];
    if (c >= 0 && c < chunks) atomicMin(&place[c], j);
  }
  const unsigned end = block_scan(
      chunks, static_cast<unsigned>(tokens), [&](int c) { return static_cast<unsigned>(start[c]); },
      [&](int c, unsigned at) { start[c] = static_cast<int>(at); });
  if (threadIdx.x == 0) start[chunks] = static_cast<int>(end);
  __syncthreads();
  const unsigned moved = block_scan(
      chunks, static_cast<unsigned>(tokens),
      [&](int j) {
        const int c = order[j];
        const bool named = c >= 0 && c < chunks && place[c] == j;
        return named ? static_cast<unsigned>(start[c + 1] - start[c]) : 0u;
      },
      [&](int j, unsigned at) { to[j] = static_cast<int>(at); });

  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; t < tokens; t += step) {
    int row = -1;
    if (t < static_cast<int64_t>(end)) {
      int c = 0, past = chunks;  // c .. past - 1 contain the last chunk that starts at or before t
      while (past - c > 1) {
        const int middle = (c + past) / 2;
        (start[middle] <= t ? c : past) = middle;
      }
      if (place[c] != kUnnamed) row = to[place[c]] + static_cast<int>(t - start[c]);
    }
    row_id_map[t] = row;
    if (row >= 0) row_source[row] = static_cast<int>(t);
    if (t >= static_cast<int64_t>(moved)) row_source[t] = -1;
  }
}

}  // namespace

Status chunk_map(const ChunkMapArgs& args, const Execution& exec) {
  const int64_t tokens = args.row_id_map.rows();
  if (tokens == 0) return {};
  const int chunks = static_cast<int>(args.split_sizes.numel());
  const int64_t blocks = ceil_div(tokens, kThreads * 4);
  return launch("chunk_map", chunk_map_kernel, blocks, kThreads, (3 * static_cast<size_t>(chunks) + 1) * sizeof(int),
                exec.stream, args.split_sizes.as<const int>(), args.order.as<const int>(), chunks,
                static_cast<int>(tokens), args.row_id_map.as<int>(), args.row_source.as<int>());
}

}  // namespace diptych::cuda
