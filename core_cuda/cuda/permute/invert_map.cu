// invert_map: finds for each row the last entry of the map that holds it, as a maximum, which does not depend on order.
#include "cuda/base/launch.cuh"
#include "diptych/format.h"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    last_slot_kernel(const int* __restrict__ row_id_map, int64_t entries, int rows, int* row_source) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= entries) return;
  const int row = __ldg(row_id_map + i);
  if (row >= 0 && row < rows) atomicMax(row_source + row, static_cast<int>(i));
}

__global__ void __launch_bounds__(kThreads) kept_kernel(const int* __restrict__ row_id_map, int64_t entries, int rows,
                                                        const int* __restrict__ row_source, int* __restrict__ kept) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= entries) return;
  const int row = __ldg(row_id_map + i);
  kept[i] = row >= 0 && row < rows && __ldg(row_source + row) == i ? row : -1;
}

}  // namespace

Status invert_map(const InvertMapArgs& args, const Execution& exec) {
  const int64_t entries = args.row_id_map.numel(), rows = args.row_source.numel(), blocks = ceil_div(entries, kThreads);
  const auto* map = args.row_id_map.as<const int>();
  int* row_source = args.row_source.as<int>();
  if (rows > 0) {
    DIPTYCH_CUDA_TRY(cudaMemsetAsync(row_source, 0xFF, rows * sizeof(int), static_cast<cudaStream_t>(exec.stream)));
  }
  if (entries == 0) return {};
  DIPTYCH_TRY(launch("invert_map", last_slot_kernel, blocks, kThreads, 0, exec.stream, map, entries,
                     static_cast<int>(rows), row_source));
  if (!args.kept.given()) return {};
  return launch("invert_map", kept_kernel, blocks, kThreads, 0, exec.stream, map, entries, static_cast<int>(rows),
                row_source, args.kept.as<int>());
}

}  // namespace diptych::cuda
