// Rowwise copies of permuted rows in block formats. A warp encodes a piece of a token's row once and writes it to each
// destination, sixteen bytes a lane. There is no barrier, because each warp looks up its token's destinations itself.
// Absent rows are distributed over all warps.
#include <algorithm>

#include "cuda/base/launch.cuh"
#include "cuda/quantize/permuted/rows.cuh"

namespace diptych::cuda {
namespace {

constexpr int kRounds = 4, kRound = 32 * 16, kPiece = kRounds * kRound;  // columns

struct PieceArgs {
  RowParams row;
  uint32_t k, rows, pieces, items, blocks;  // pieces: of one row; items: pieces of all tokens; blocks: of one row
  Divider by_pieces;
};

// Returns the piece's scales as they are stored, a word in each of sixteen lanes. made[r] is this lane's block's scale
// in round r.
template <Blocks kBlocks>
__device__ __forceinline__ uint32_t scale_word(const uint32_t (&made)[kRounds]) {
  const unsigned lane = threadIdx.x % 32;
  uint32_t word = 0;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    uint32_t mine = made[r];
    if constexpr (kBlocks == Blocks::mx) {  // a code in two lanes; four codes a word, in lanes 0, 8, 16 and 24
      mine |= __shfl_xor_sync(kAllLanes, mine, 2) << 8;
      mine |= __shfl_xor_sync(kAllLanes, mine, 4) << 16;
    }
    mine = __shfl_sync(kAllLanes, mine, lane % 4 * 8);
    if (lane / 4 == r) word = mine;
  }
  return word;
}

// Stores the lanes' words of scales to a row's blocks from `first` on.
template <Blocks kBlocks>
__device__ __forceinline__ void store_word(const PieceArgs& p, uint64_t row, uint32_t first, uint32_t word) {
  const unsigned lane = threadIdx.x % 32;
  if (lane >= 16) return;
  if constexpr (kBlocks == Blocks::mx) {
    const uint32_t block = first + lane * 4;
    uint8_t* at = static_cast<uint8_t*>(p.row.scale) + row * p.blocks + block;
    if (p.row.words) {
      if (block < p.blocks) *reinterpret_cast<uint32_t*>(at) = word;
    } else {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        if (block + b < p.blocks) at[b] = static_cast<uint8_t>(word >> (b * 8));
      }
    }
  } else if (first + lane < p.blocks) {
    static_cast<uint32_t*>(p.row.scale)[row * p.blocks + first + lane] = word;
  }
}

template <typename T, bool kE5M2, Blocks kBlocks>
__global__ void __launch_bounds__(kBlock, 8) permuted_pieces_kernel(const __grid_constant__ PieceArgs p) {
  constexpr int kLanes = kWidth<kBlocks> / 16;
  const unsigned lane = threadIdx.x % 32;
  const uint32_t item = blockIdx.x * (kBlock / 32) + threadIdx.x / 32, warps = gridDim.x * (kBlock / 32);
  const uint64_t k = p.k;
  AbsentOfWarp absent(p.row.absent.row_source, p.rows, item, warps);

  if (item < p.items) {
    const uint32_t token = p.by_pieces(item), first = (item - token * p.pieces) * kPiece, col = first + lane * 16;
    const T* from = static_cast<const T*>(p.row.x.data) + token * k + col;
    Row8<T> x[kRounds][2];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (col + r * kRound + h * 8 < p.k) x[r][h].v[0] = Vec<T>::load(from + r * kRound + h * 8);
      }
    }
    const int slots = p.row.slots;
    const int* map = p.row.row_id_map + static_cast<uint64_t>(token) * slots;
    int row = static_cast<int>(lane) < slots ? __ldg(map + lane) : -1;

    uint4 bytes[kRounds];
    uint32_t made[kRounds];  // the stored scale of this lane's block
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      x[r][0] = without_inf(x[r][0]), x[r][1] = without_inf(x[r][1]);
      float m = max_abs(max_abs(0.0f, x[r][0]), x[r][1]);
#pragma unroll
      for (int mask = kLanes / 2; mask > 0; mask /= 2) m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, mask));
      float s;
      if constexpr (kBlocks == Blocks::mx) {
        made[r] = e8m0_from_amax(m, p.row.max_reciprocal), s = e8m0_reciprocal(made[r]);
      } else {
        s = scale_from_amax(p.row.rule, m), made[r] = bits_of(reciprocal_rn(s));
      }
      const uint2 lo = encode_row8<kE5M2>(x[r][0], [&](int) { return s; });
      const uint2 hi = encode_row8<kE5M2>(x[r][1], [&](int) { return s; });
      bytes[r] = make_uint4(lo.x, lo.y, hi.x, hi.y);
    }
    const uint32_t word = scale_word<kBlocks>(made), first_block = first / kWidth<kBlocks>;
    for (int s0 = 0;;) {
      unsigned there = __ballot_sync(kAllLanes, static_cast<unsigned>(row) < p.rows);
      for (; there != 0; there &= there - 1) {
        const uint32_t to_row = __shfl_sync(kAllLanes, row, __ffs(there) - 1);
        uint8_t* to = p.row.out + to_row * k + col;
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          const uint4 v = bytes[r];
          if (p.row.vec_out16) {
            if (col + r * kRound < p.k) *reinterpret_cast<uint4*>(to + r * kRound) = v;
          } else {
            uint2* at = reinterpret_cast<uint2*>(to + r * kRound);
            if (col + r * kRound < p.k) at[0] = make_uint2(v.x, v.y);
            if (col + r * kRound + 8 < p.k) at[1] = make_uint2(v.z, v.w);
          }
        }
        store_word<kBlocks>(p, to_row, first_block, word);
      }
      if ((s0 += 32) >= slots) break;
      row = s0 + static_cast<int>(lane) < slots ? __ldg(map + s0 + lane) : -1;
    }
  }

  uint32_t none;
  if constexpr (kBlocks == Blocks::mx) {
    none = e8m0_from_amax(0.0f, p.row.max_reciprocal);
  } else {
    none = bits_of(reciprocal_rn(scale_from_amax(p.row.rule, 0.0f)));
  }
  absent.each([&](uint64_t to) {
    for (uint32_t c = lane * 8; c < p.k; c += 256) {
      *reinterpret_cast<uint2*>(p.row.out + to * k + c) = make_uint2(0, 0);
    }
    for (uint32_t b = lane; b < p.blocks; b += 32) {
      if constexpr (kBlocks == Blocks::mx) {
        static_cast<uint8_t*>(p.row.scale)[to * p.blocks + b] = static_cast<uint8_t>(none);
      } else {
        static_cast<uint32_t*>(p.row.scale)[to * p.blocks + b] = none;
      }
    }
  });
}

}  // namespace

bool row_pieces_fit(const RowParams& p) {
  constexpr int64_t kMost = int64_t{1} << 30;  // so that 32 bits can count all warps' pieces and rows
  return p.x.type != DType::f32 && p.vec_x && p.vec_out && p.k < kMost && p.absent.rows < kMost &&
         p.tokens * ceil_div(p.k, kPiece) < kMost;
}

Status quantize_row_pieces(const RowParams& row, Blocks blocks, DType element, const Execution& exec) {
  PieceArgs p{.row = row};
  p.k = static_cast<uint32_t>(row.k), p.rows = static_cast<uint32_t>(row.absent.rows);
  p.pieces = static_cast<uint32_t>(ceil_div(row.k, kPiece)), p.items = static_cast<uint32_t>(row.tokens) * p.pieces;
  p.blocks = static_cast<uint32_t>(row.blocks), p.by_pieces = Divider(p.pieces);
  constexpr int kWarps = kBlock / 32;
  // With few tokens there may still be many absent rows.
  const int64_t grid = std::max(ceil_div(p.items, kWarps), std::min<int64_t>(ceil_div(p.rows, kWarps), 1024));
  const auto run = [&](auto type, auto e5m2) {
    using T = decltype(type);
    return blocks == Blocks::mx
               ? launch("quantize", permuted_pieces_kernel<T, e5m2.value, Blocks::mx>, grid, kBlock, 0, exec.stream, p)
               : launch("quantize", permuted_pieces_kernel<T, e5m2.value, Blocks::vector>, grid, kBlock, 0, exec.stream,
                        p);
  };
  return with_element(element, "quantize", [&](auto e5m2) {
    return row.x.type == DType::f16 ? run(__half{}, e5m2) : run(__nv_bfloat16{}, e5m2);
  });
}

}  // namespace diptych::cuda
