// 128x128 blocks of permuted rows, a rowwise copy alone, of tokens with many rows each. permuted_tiles reads a token
// once for each of its rows, which is more than L2 delivers. Here it is read twice: for the maxima, which meet where
// the scales will be, and to be written to all of its rows. That goes by strips of columns, so narrow that L2 still
// holds what is read again. A launch writes a strip and then reads the next one: mixed, DRAM would turn around for each
// few reads.
#include <algorithm>

#include "cuda/base/launch.cuh"
#include "cuda/permute/rows.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/quantize/permuted/patch.cuh"
#include "cuda/quantize/tiles.cuh"

namespace diptych::cuda {
namespace {

constexpr uint32_t kPiece = 512;          // columns that a warp takes of a token: sixteen a lane, a block eight lanes
constexpr int kTogether = 2;              // pieces that a warp reads at one time for their maxima
constexpr int64_t kStripOfX = 24 << 20;   // bytes that are read twice, or as many as a piece of all tokens has
constexpr int64_t kLeastWritten = 256e6;  // bytes; what launches cost is less than what L2 gains
constexpr int64_t kLeastRows = 5;         // for each token
constexpr int64_t kMostSlots = 8;         // of a token: as many as lanes have a block

struct StripArgs {
  const void* x;
  const int* row_id_map;
  const int* row_source;
  uint8_t* row;  // [rows, k]
  float* scale;  // [tiles_m, tiles_k]; a strip's are amaxes until it is written
  DivideRule rule;
  uint32_t k, tokens, slots, rows, tiles_m, tiles_k;
  uint32_t cols, pieces, items;  // of a strip: columns, pieces of one token and of all
  Divider by_pieces;
  uint32_t strips, writers;  // the first thread blocks write, the others take maxima
  uint32_t turn;             // of strip `turn`, when turn - 1 is written; strip turn - 2 gets its scales
};

// Four neighbouring blocks of one token.
struct TokenPiece {
  uint32_t token, col;        // this lane's first column
  bool exists, block_exists;  // this lane's columns; some of its block's

  __device__ __forceinline__ TokenPiece(const StripArgs& p, uint32_t strip, uint32_t item)
      : token(p.by_pieces(item)),
        col(strip * p.cols + (item - token * p.pieces) * kPiece + threadIdx.x % 32 * 16),
        exists(item < p.items && col < p.k),
        block_exists(item < p.items && col / kTile * kTile < p.k) {}

  template <typename T>
  __device__ __forceinline__ void load(const StripArgs& p, uint64_t policy, Row8<T> (&x)[2]) const {
    if (!exists) return;
    const T* from = static_cast<const T*>(p.x) + static_cast<uint64_t>(token) * p.k + col;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t (&w)[4] = x[h].v[0].w;
      asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                   : "l"(from + h * 8), "l"(policy));
    }
  }
  // Of the slot that this lane looks at, one of a block's eight. No row: p.rows or more.
  __device__ __forceinline__ uint32_t row(const StripArgs& p) const {
    const uint32_t slot = threadIdx.x % 8;
    if (!block_exists || slot >= p.slots) return ~0u;
    return static_cast<uint32_t>(p.row_id_map[static_cast<uint64_t>(token) * p.slots + slot]);
  }
  // Of the block that holds this lane's columns of that row.
  __device__ __forceinline__ float* scale(const StripArgs& p, uint32_t row) const {
    return p.scale + static_cast<uint64_t>(row / kTile) * p.tiles_k + col / kTile;
  }
};

template <typename T, typename Max>
__device__ __forceinline__ uint32_t max_of(const Row8<T> (&x)[2], Max&& max) {
  uint32_t two = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) two = max(two, x[i / 4].v[0].w[i % 4]);
  return two;
}

template <typename T>
__device__ __forceinline__ void take_maxima(const StripArgs& p, uint32_t first_item) {
  const uint64_t kept = keep_in_l2();
  Row8<T> x[kTogether][2];
  uint32_t row[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const TokenPiece piece(p, p.turn, first_item + i);
    piece.load(p, kept, x[i]);
    row[i] = piece.row(p);
  }
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const TokenPiece piece(p, p.turn, first_item + i);
    uint32_t two = max_of(x[i], [](uint32_t a, uint32_t b) { return max_abs2<T>(a, b); });
    if (!finite2<T>(two)) two = max_of(x[i], [](uint32_t a, uint32_t b) { return max_abs2<T>(a, without_inf2<T>(b)); });
    float m = max_abs(max_abs(0.0f, lower<T>(two)), upper<T>(two));
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, mask));
    // Non-negative floats order as their bits do.
    if (row[i] < p.rows) atomicMax(reinterpret_cast<int*>(piece.scale(p, row[i])), static_cast<int>(bits_of(m)));
  }
}

// Waits for the grid before, when it has asked for what that does not write.
template <typename T, bool kE5M2>
__device__ __forceinline__ void write_rows(const StripArgs& p, uint32_t item) {
  const unsigned lane = threadIdx.x % 32;
  const TokenPiece piece(p, p.turn - 1, item);
  Row8<T> x[2];
  const uint32_t row = piece.row(p);
  piece.load(p, leave_l2(), x);
  ptx::wait_for_grid_before();
  const float own = row < p.rows ? scale_from_amax(p.rule, __ldcg(piece.scale(p, row))) : 1.0f;
  const uint32_t two = max_of(x, [](uint32_t a, uint32_t b) { return max_abs_nan2<T>(a, b); });
  const auto encode = [&](auto with_nan) {
    unsigned there = __ballot_sync(kAllLanes, row < p.rows) & 0xff;  // the first block exists, if any does
    for (; there != 0; there &= there - 1) {
      const int slot = __ffs(there) - 1;
      const uint32_t to = __shfl_sync(kAllLanes, row, slot);
      const float scale = __shfl_sync(kAllLanes, own, lane / 8 * 8 + slot);
      const uint2 a = encode_patch_row<kE5M2, with_nan.value>(x[0], [&](int) { return scale; });
      const uint2 b = encode_patch_row<kE5M2, with_nan.value>(x[1], [&](int) { return scale; });
      if (!piece.exists) continue;
      __stcs(reinterpret_cast<uint4*>(p.row + static_cast<uint64_t>(to) * p.k + piece.col),
             make_uint4(a.x, a.y, b.x, b.y));
    }
  };
  if (__any_sync(kAllLanes, !finite2<T>(two))) {
    encode(std::true_type{});
  } else {
    encode(std::false_type{});
  }
}

__device__ __forceinline__ void invert_scales(const StripArgs& p, uint32_t strip) {
  const uint32_t tiles = p.cols / kTile, first = strip * tiles, count = min(tiles, p.tiles_k - first);
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < p.tiles_m * count; i += p.writers * kThreads) {
    float* at = p.scale + static_cast<uint64_t>(i / count) * p.tiles_k + first + i % count;
    *at = reciprocal_rn(scale_from_amax(p.rule, __ldcg(at)));
  }
}

template <typename T, bool kE5M2>
__global__ void __launch_bounds__(kThreads, 6) permuted_strip_kernel(const __grid_constant__ StripArgs p) {
  if (p.turn == 0) ptx::wait_for_grid_before();
  if (p.turn <= p.strips) ptx::let_next_grid_start();  // what the first waited for is there for all
  if (blockIdx.x < p.writers) {
    write_rows<T, kE5M2>(p, blockIdx.x * kWarps + threadIdx.x / 32);
    if (p.turn > 1) invert_scales(p, p.turn - 2);
    return;
  }
  const uint32_t warp = (blockIdx.x - p.writers) * kWarps + threadIdx.x / 32;
  take_maxima<T>(p, warp * kTogether);
  if (p.turn != 0) {
    ptx::wait_for_grid_before();
    return;
  }
  AbsentOfWarp(p.row_source, p.rows, warp, gridDim.x * kWarps).each([&](uint64_t row) {
    for (uint32_t c = threadIdx.x % 32 * 16; c < p.k; c += kPiece)
      *reinterpret_cast<uint4*>(p.row + row * p.k + c) = make_uint4(0, 0, 0, 0);
  });
}

}  // namespace

bool permuted_strips_pay(const TileArgs& p, Scaling scaling, const TensorView& row_id_map, const Execution& exec) {
  const int64_t tokens = p.in.from.none, slots = row_id_map.cols();
  return scaling == Scaling::square && patched(p.in) && p.row && !p.col && aligned(p.row, 16) && p.k % 16 == 0 &&
         tokens > 0 && slots <= kMostSlots && p.m >= kLeastRows * tokens && p.m * p.k >= kLeastWritten &&
         device_info(exec.device.index).arch == 90;
}

Status permuted_strips(const TileArgs& tile, const TensorView& row_id_map, DType element, const Execution& exec) {
  StripArgs p{.x = tile.in.x.data,
              .row_id_map = row_id_map.as<const int>(),
              .row_source = tile.in.from.row_source,
              .row = tile.row,
              .scale = tile.row_scale,
              .rule = tile.rule};
  p.k = static_cast<uint32_t>(tile.k), p.tokens = tile.in.from.none, p.rows = static_cast<uint32_t>(tile.m);
  p.slots = static_cast<uint32_t>(row_id_map.cols()), p.tiles_m = tile.tiles_m, p.tiles_k = tile.tiles_k;
  const int64_t piece_of_all = int64_t{p.tokens} * kPiece * 2, most = ceil_div(tile.k, kPiece);
  p.pieces = static_cast<uint32_t>(std::clamp<int64_t>(kStripOfX / std::max<int64_t>(1, piece_of_all), 1, most));
  p.cols = p.pieces * kPiece, p.items = p.tokens * p.pieces, p.by_pieces = Divider(p.pieces);
  p.strips = static_cast<uint32_t>(ceil_div(p.k, p.cols));
  const uint32_t writers = ceil_div(p.items, kWarps), readers = ceil_div(p.items, kWarps * kTogether);
  const uint32_t last = ceil_div(p.tiles_m * (p.cols / kTile), kThreads);
  DIPTYCH_CUDA_TRY(
      cudaMemsetAsync(p.scale, 0, sizeof(float) * p.tiles_m * p.tiles_k, static_cast<cudaStream_t>(exec.stream)));
  return with_element(element, "quantize", [&](auto e5m2) {
    return with_patch_type(tile.in, [&](auto type) -> Status {
      for (p.turn = 0; p.turn < p.strips + 2; ++p.turn) {
        p.writers = p.turn == 0 ? 0 : p.turn <= p.strips ? writers : last;
        DIPTYCH_TRY(launch_after("quantize", permuted_strip_kernel<decltype(type), e5m2.value>,
                                 int64_t{p.writers} + (p.turn < p.strips ? readers : 0), kThreads, 0, exec, p));
      }
      return {};
    });
  });
}

}  // namespace diptych::cuda
