// 128x128 blocks of permuted rows: only a rowwise copy, of tokens with many rows each. permuted_tiles reads a token
// once for each of its rows, which exceeds L2's bandwidth. Here a token is read twice: first for the maxima, which are
// joined where the scales will be stored, then to be written to all of its rows. The kernels take strips of columns
// that are so narrow that L2 still holds what is read again. A launch first writes a strip and then reads the next one,
// because DRAM loses time when it switches between reads and writes.
#include <algorithm>

#include "cuda/base/launch.cuh"
#include "cuda/permute/rows.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/quantize/permuted/patch.cuh"
#include "cuda/quantize/tiles.cuh"

namespace diptych::cuda {
namespace {

constexpr uint32_t kPiece = 512;  // columns of a token that a warp takes: sixteen a lane, so a block has eight lanes
constexpr int kTogether = 2;      // pieces that a warp reads at once for their maxima
constexpr int64_t kStripOfX = 24 << 20;   // bytes of a strip of x; more if one piece of every token has more
constexpr int64_t kLeastWritten = 256e6;  // bytes; with fewer the launches cost more than L2 gains
constexpr int64_t kLeastRows = 5;         // least rows for each token
constexpr int64_t kMostSlots = 8;         // slots of a token: as many as a block has lanes

struct StripArgs {
  const void* x;
  const int* row_id_map;
  const int* row_source;
  uint8_t* row;  // [rows, k]
  float* scale;  // [tiles_m, tiles_k]; amaxes until their strip is written
  DivideRule rule;
  uint32_t k, tokens, slots, rows, tiles_m, tiles_k;
  uint32_t cols, pieces, items;  // a strip's columns; its pieces of one token; its pieces of all tokens
  Divider by_pieces;
  uint32_t strips, writers;  // the first thread blocks write, the others take maxima
  uint32_t turn;  // maxima are taken of strip `turn`, strip turn - 1 is written, scales of strip turn - 2 are inverted
};

// Four neighbouring blocks of one token.
struct TokenPiece {
  uint32_t token, col;        // this lane's first column
  bool exists, block_exists;  // whether this lane's columns exist; whether some of its block do

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
  // Returns the row of this lane's slot, one of eight in the lanes of a block; p.rows or more if there is none.
  __device__ __forceinline__ uint32_t row(const StripArgs& p) const {
    const uint32_t slot = threadIdx.x % 8;
    if (!block_exists || slot >= p.slots) return ~0u;
    return static_cast<uint32_t>(p.row_id_map[static_cast<uint64_t>(token) * p.slots + slot]);
  }
  // Returns the scale of the block that holds this lane's columns of that row.
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

// Loads what the grid before does not write, then waits for that grid.
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
    unsigned there = __ballot_sync(kAllLanes, row < p.rows) & 0xff;  // if any block exists, the first one does
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
  if (p.turn <= p.strips) ptx::let_next_grid_start();  // the first launch has waited for the data of all
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

bool quantize_permuted_strips_fits(const QuantizeArgs& args) {
  if (args.source.kind != SourceKind::permuted) return false;
  const TileArgs p = tile_args(args);
  const int64_t tokens = p.in.from.none, slots = args.source.row_id_map.cols();
  return patched(p.in) && p.row && !p.col && aligned(p.row, 16) && p.k % 16 == 0 && tokens > 0 && slots <= kMostSlots &&
         p.m >= kLeastRows * tokens && p.m * p.k >= kLeastWritten;
}

Status quantize_permuted_strips(const QuantizeArgs& args, const Execution& exec) {
  const TileArgs tile = tile_args(args);
  const TensorView& row_id_map = args.source.row_id_map;
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
  return with_element(row(args.spec.format).element, "quantize", [&](auto e5m2) {
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
