// Reads that come now and then between writes cost DRAM more time than they take: it turns around for each few of them.
// Here every SM fills its shared memory with tokens, and then writes them out to all of their rows; a launch is a slice
// of the tokens that fits all SMs, and starts when the one before it has written, so that all of them read at one time.
#include "cuda/launch.cuh"
#include "cuda/permute/rows.cuh"
#include "cuda/permute/slices.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/grid.cuh"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEntries = 16 * kThreads;  // of the map that a block looks through at once
constexpr int kShared = 216 << 10;       // bytes of tokens and of a row to fill with
constexpr int64_t kLeastRow = 4 << 10;   // bytes
constexpr int kManyRows = 6;             // of each token

struct SliceParams {
  RowBytes plane;
  const int* row_id_map;
  const int* source;
  const void* probs;
  void* permuted_probs;
  int prob_bytes;  // 0: none
  int tokens, slots, rows;
  int each, first;    // tokens of a block, the slice's first one
  int block, blocks;  // the slice's first block among all slices', and how many they have
};

__global__ void __launch_bounds__(kThreads, 1) permute_slice_kernel(const __grid_constant__ SliceParams p) {
  DIPTYCH_DYNAMIC_SHARED_ALIGNED(tokens, 128);
  __shared__ __align__(8) uint64_t landed;
  __shared__ uint16_t entries[kEntries];  // those of the batch that name a row, in any order
  __shared__ int count;
  if constexpr (ptx::kBulk) {
    // Later slices start once all of this one's blocks have said so: what the first one waits for is there.
    if (p.block == 0) ptx::wait_for_grid_before();
    const int bytes = static_cast<int>(p.plane.bytes), token = p.first + static_cast<int>(blockIdx.x) * p.each;
    const int n = max(0, min(p.each, p.tokens - token));
    uint8_t* absent = tokens + p.each * bytes;
    if (threadIdx.x == 0) {
      ptx::barrier_init(&landed, 1);
      ptx::barrier_init_fence();
      ptx::barrier_arrive_expect(&landed, n * bytes);
      for (int i = 0; i < n; ++i)
        ptx::bulk_load(tokens + i * bytes, p.plane.in + static_cast<int64_t>(token + i) * bytes, bytes, &landed);
    }
    for (int i = threadIdx.x; i < bytes / 16; i += kThreads)
      reinterpret_cast<uint4*>(absent)[i] = make_uint4(p.plane.fill, p.plane.fill, p.plane.fill, p.plane.fill);
    ptx::bulk_sees_stores();

    const int64_t first = static_cast<int64_t>(token) * p.slots;
    // Which of the map's entries q0 .. name a row; `count` of them are then in `entries`.
    auto look = [&](int q0) {
      int row[kEntries / kThreads];
#pragma unroll
      for (int j = 0; j < kEntries / kThreads; ++j) {
        const int q = q0 + j * kThreads + threadIdx.x;
        row[j] = q < n * p.slots ? p.row_id_map[first + q] : -1;
      }
      if (threadIdx.x == 0) count = 0;
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kEntries / kThreads; ++j) {
        if (static_cast<unsigned>(row[j]) < static_cast<unsigned>(p.rows))
          entries[atomicAdd(&count, 1)] = static_cast<uint16_t>(j * kThreads + threadIdx.x);
      }
      __syncthreads();
    };
    look(0);
    for (int64_t r = p.block + blockIdx.x + static_cast<int64_t>(threadIdx.x) * p.blocks; r < p.rows;
         r += static_cast<int64_t>(kThreads) * p.blocks) {
      if (p.source[r] >= 0) continue;
      ptx::bulk_store(p.plane.out + r * bytes, absent, bytes);
      if (p.prob_bytes != 0) store_bits(p.permuted_probs, r, p.prob_bytes, 0);
    }
    bool waited = n == 0;
    for (int q0 = 0; q0 < n * p.slots; q0 += kEntries) {
      if (q0 != 0) {
        __syncthreads();  // the last ones have been read
        look(q0);
      }
      for (int i = threadIdx.x; i < count; i += kThreads) {
        const int q = q0 + entries[i], row = p.row_id_map[first + q];
        uint64_t bits = 0;
        if (p.prob_bytes != 0) bits = load_bits(p.probs, first + q, p.prob_bytes);
        if (!waited) ptx::barrier_wait(&landed, 0), waited = true;
        ptx::bulk_store(p.plane.out + static_cast<int64_t>(row) * bytes, tokens + q / p.slots * bytes, bytes);
        if (p.prob_bytes != 0) store_bits(p.permuted_probs, row, p.prob_bytes, bits);
      }
    }
    if (!waited) ptx::barrier_wait(&landed, 0);  // nobody leaves while tokens arrive
    ptx::bulk_commit();
    ptx::bulk_wait_read();
    __syncthreads();
    ptx::let_next_grid_start();
    if (p.block != 0) ptx::wait_for_grid_before();  // its end implies that of the slices before it
  }
}

}  // namespace

bool slices_pay(const PermuteArgs& args, const Execution& exec) {
  if (args.plane_count != 1 || args.zero_prob_is_padding) return false;
  const RowBytes r = row_bytes(args.planes[0]);
  const int64_t tokens = args.row_id_map.rows();
  const DeviceInfo device = device_info(exec.device.index);
  return device.arch == 90 && r.unit == 16 && r.bytes >= kLeastRow && r.bytes <= kShared / 8 &&
         args.source.numel() >= kManyRows * tokens && tokens * r.bytes >= int64_t{kShared} * device.sm_count;
}

Status permute_slices(const PermuteArgs& args, const Execution& exec) {
  static SharedGrant grant;
  DIPTYCH_TRY(grant.raise(permute_slice_kernel, exec.device.index, kShared, cudaSharedmemCarveoutMaxShared));
  SliceParams p{};
  p.plane = row_bytes(args.planes[0]);
  p.row_id_map = args.row_id_map.as<const int>(), p.source = args.source.as<const int>();
  p.probs = args.probs.data, p.permuted_probs = args.permuted_probs.data;
  p.prob_bytes = args.probs.given() ? bytes(args.probs.dtype) : 0;
  p.tokens = static_cast<int>(args.row_id_map.rows()), p.slots = static_cast<int>(args.row_id_map.cols());
  p.rows = static_cast<int>(args.source.numel());
  const int64_t grid = device_info(exec.device.index).sm_count;
  const int64_t most = kShared / p.plane.bytes - 1, slices = ceil_div(p.tokens, grid * most);
  p.each = static_cast<int>(ceil_div(p.tokens, grid * slices)), p.blocks = static_cast<int>(grid * slices);
  for (int64_t s = 0; s < slices; ++s) {
    p.block = static_cast<int>(grid * s), p.first = p.block * p.each;
    DIPTYCH_TRY(launch_after("permute", permute_slice_kernel, grid, kThreads, (p.each + 1) * p.plane.bytes, exec, p));
  }
  return {};
}

}  // namespace diptych::cuda
