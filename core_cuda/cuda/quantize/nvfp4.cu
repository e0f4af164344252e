// NVFP4: E2M1 in blocks of 16 with E4M3 scales relative to an amax of the tensor; makes rowwise and transposed copies
// from one read.
//
// A thread block holds a tile of 128 columns in shared memory, in bands of 16 rows. A thread encodes whole blocks: 16
// neighbours of a row, or 16 rows of two columns. Lanes whose output bytes are neighbours are neighbours in a warp, so
// outputs are stored directly.
#include "cuda/base/e2m1.cuh"
#include "cuda/base/hadamard.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/vector.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/quantize/dither.cuh"
#include "cuda/quantize/permuted/patch.cuh"
#include "cuda/quantize/quantize.h"
#include "cuda/source/source.cuh"

namespace diptych::cuda {
namespace {

constexpr int kBlock = 16, kCols = 128, kBlocks = kCols / kBlock;

struct Nvfp4Args {
  const void* x;  // [m, k]
  int64_t m, k;
  SourceArgs in;             // the source, if it is not plain x
  bool gathered;             // permuted rows in whole vectors: they are copied as x is
  Strips strips;             // gathered: the order of tiles
  unsigned tiles_k;          // else tiles run along k first
  const float* row_amax;     // [1], or [m] if each_row
  const float* col_amax;     // [1]
  const uint32_t* rng;       // [4], or [8] for a part of a tensor
  uint8_t *row, *row_scale;  // [m, k / 2] and [m, k / 16], or null
  uint8_t *col, *col_scale;  // [k, m / 2] and [k, m / 16], or null
  bool each_row, square, rht, rht_signs, part;
  bool vec_x, vec_row, vec_col;  // aligned to 16, 8 and 8 bytes
};

// ---- a block ----

// The sixteen elements of a block. 16-bit types: two in a word, the first in the lower half.
template <typename T>
struct Block {
  static constexpr int kWords = kBlock * sizeof(T) / 4;
  uint32_t w[kWords];
};

template <typename T>
__device__ __forceinline__ float2 pair_floats(uint32_t w) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return make_float2(float_of(w << 16), float_of(w & 0xffff0000));
  } else {
    __half2 h;
    memcpy(&h, &w, sizeof(w));
    return __half22float2(h);
  }
}

// Returns the larger of two magnitudes, where NaN is the largest: they order as their bits do.
__device__ __forceinline__ float max_nan(float a, float b) {
  const uint32_t u = bits_of(a), v = bits_of(b);
  return float_of(u > v ? u : v);
}

// Returns the largest magnitude, or NaN if an element is NaN or infinite.
template <typename T>
__device__ __forceinline__ float amax_of(const Block<T>& x) {
  if constexpr (sizeof(T) == 4) {
    float m = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) m = max_nan(m, float_of(x.w[i] & 0x7fffffff));
    return without_inf(m);
  } else {
    uint32_t m = x.w[0];
#pragma unroll
    for (int i = 1; i < Block<T>::kWords; ++i) m = max_abs_nan2<T>(m, x.w[i]);
    const float2 f = pair_floats<T>(m & 0x7fff7fff);
    return without_inf(max_nan(f.x, f.y));
  }
}

template <typename T>
__device__ __forceinline__ void to_floats(const Block<T>& x, float (&v)[kBlock]) {
#pragma unroll
  for (int i = 0; i < Block<T>::kWords; ++i) {
    if constexpr (sizeof(T) == 4) {
      v[i] = float_of(x.w[i]);
    } else {
      const float2 f = pair_floats<T>(x.w[i]);
      v[2 * i] = f.x, v[2 * i + 1] = f.y;
    }
  }
}

// Returns the bytes with the signs of elements 0, 2, 4, 6 and of 1, 3, 5, 7; a sign is its byte's top bit.
template <typename T>
__device__ __forceinline__ uint2 sign_bytes(const uint32_t* w) {
  uint32_t even, odd;
  if constexpr (sizeof(T) == 4) {
    even = __byte_perm(__byte_perm(w[0], w[2], 0x73), __byte_perm(w[4], w[6], 0x73), 0x5410);
    odd = __byte_perm(__byte_perm(w[1], w[3], 0x73), __byte_perm(w[5], w[7], 0x73), 0x5410);
  } else {
    const uint32_t first = __byte_perm(w[0], w[1], 0x7351), second = __byte_perm(w[2], w[3], 0x7351);
    even = __byte_perm(first, second, 0x5410), odd = __byte_perm(first, second, 0x7632);
  }
  return {even, odd};
}

// Returns the payload of a block, eight bytes. `amax` is the amax of the block or of a square that contains it; NaN
// makes all codes 7. `r`: the block's random bytes, with kStochastic.
template <typename T, bool kStochastic>
__device__ __forceinline__ uint2 encode_block(const Block<T>& x, float amax, float factor, const uint32_t (&r)[4]) {
  float v[kBlock];
  to_floats(x, v);
  const auto half = [&](int h) {
    const uint2 signs = sign_bytes<T>(x.w + h * Block<T>::kWords / 2);
    const auto magnitude = [&](int j) { return multiply_rn(fabsf(v[h * 8 + j]), factor); };
    if constexpr (kStochastic) {
      return e2m1_dithered8(signs, r[h * 2], r[h * 2 + 1], magnitude);
    } else {
      // Values of 7 and more, which encode as 6, occur if the scale is 0 or 448 or the tensor's amax is too small.
      return e2m1_pack8(packed_nibbles(signs.x, signs.y) & 0x88888888,
                        [&](int j) { return e2m1_code(fminf(magnitude(j), 6.5f)); });
    }
  };
  const uint2 q = make_uint2(half(0), half(1));
  constexpr uint32_t kSixes = 0x77777777;
  return amax == amax ? q : make_uint2(kSixes, kSixes);
}

// Returns the block that encodes the Hadamard transform of z.
template <typename T>
__device__ __forceinline__ Block<T> rotated(float (&z)[kHadamard], bool signs) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) z[i] = through_bf16(z[i]);
  }
  hadamard16(z, signs);
  Block<T> r;
#pragma unroll
  for (int i = 0; i < Block<T>::kWords; ++i) {
    if constexpr (sizeof(T) == 4) {
      r.w[i] = bits_of(through_bf16(z[i]));
    } else {
      r.w[i] = pack2<T>(z[2 * i], z[2 * i + 1]);
    }
  }
  return r;
}

__device__ __forceinline__ void store8(uint8_t* p, uint2 v, bool vec) {
  if (vec) {
    *reinterpret_cast<uint2*>(p) = v;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) p[i] = static_cast<uint8_t>((i < 4 ? v.x : v.y) >> (i % 4 * 8));
}

// ---- a tile ----

// A chunk is 16 bytes. Chunks of a row are permuted within groups of eight, by band and by group, so that neither lanes
// along a row nor lanes down the bands have bank conflicts.
template <typename T>
struct Tile {
  static constexpr int kRows = sizeof(T) == 4 ? 64 : 128;
  static constexpr int kBands = kRows / kBlock, kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kOwn = kBands / kWarps;  // bands of a warp in the rowwise pass
  static constexpr int kPerChunk = 16 / sizeof(T), kChunks = kCols / kPerChunk;
  static constexpr int kPairs = 32 / kBands;  // pairs of columns that a warp encodes at once in every band
  static constexpr int kPitch = kCols * sizeof(T);

  __device__ __forceinline__ static unsigned offset(unsigned band, unsigned row, unsigned chunk) {
    const unsigned turn = (band * (2 * kPairs / kPerChunk)) ^ (chunk / 8);
    return (band * kBlock + row) * kPitch + (chunk ^ (turn & 7)) * 16;
  }
};

// Starts the copy of a tile; rows and columns outside x become zeros.
template <typename T>
__device__ __forceinline__ void load_tile(const Nvfp4Args& p, uint8_t* tile, int64_t row0, int64_t col0) {
  using S = Tile<T>;
  constexpr int kStep = S::kThreads / S::kChunks;  // rows at once
  static_assert(kBlock % kStep == 0);
  const unsigned first = threadIdx.x / S::kChunks, chunk = threadIdx.x % S::kChunks;
  const int64_t col = col0 + chunk * S::kPerChunk;
  const T* x = static_cast<const T*>(p.x) + (row0 + first) * p.k + col;
  const int64_t left = col < p.k ? p.m - row0 - first : 0;  // rows from `first` on; k is a multiple of 16
  const int rows = left < S::kRows ? static_cast<int>(left) : S::kRows;
  const auto to = [&](int i) { return tile + S::offset(i / kBlock, first + i % kBlock, chunk); };
  if (p.vec_x && rows > S::kRows - kStep) {
#pragma unroll
    for (int i = 0; i < S::kRows; i += kStep) ptx::copy_async16(to(i), x + i * p.k, true);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < S::kRows; i += kStep) {
    if (p.vec_x) {
      ptx::copy_async16(to(i), i < rows ? x + i * p.k : p.x, i < rows);
      continue;
    }
    for (int j = 0; j < S::kPerChunk; ++j) reinterpret_cast<T*>(to(i))[j] = i < rows ? x[i * p.k + j] : T{};
  }
}

// Starts the copy of a tile of permuted rows.
template <typename T>
__device__ __forceinline__ void gather_tile(const Nvfp4Args& p, uint8_t* tile, int64_t row0, int64_t col0) {
  using S = Tile<T>;
  constexpr int kStep = S::kThreads / S::kChunks;  // rows at once
  const unsigned first = threadIdx.x / S::kChunks, chunk = threadIdx.x % S::kChunks;
  const int64_t col = col0 + chunk * S::kPerChunk, left = col < p.k ? p.m - row0 - first : 0;
  uint32_t token[S::kRows / kStep];
#pragma unroll
  for (int i = 0; i < S::kRows; i += kStep) {
    token[i / kStep] = i < left ? p.in.from.at(row0 + first + i) : p.in.from.none;
  }
  const T* x = static_cast<const T*>(p.x) + col;
#pragma unroll
  for (int i = 0; i < S::kRows; i += kStep) {
    const uint32_t t = token[i / kStep];
    ptx::copy_async16(tile + S::offset(i / kBlock, first + i % kBlock, chunk), t < p.in.from.none ? x + t * p.k : p.x,
                      t < p.in.from.none);
  }
}

// Fills a tile with computed values, eight of a row at a time.
template <typename In>
__device__ __forceinline__ void compute_tile(const SourceArgs& in, uint8_t* tile, int64_t row0, int64_t col0) {
  using S = Tile<float>;
  constexpr unsigned kGroups = kCols / 8, kStep = S::kThreads / kGroups;
  const unsigned first = threadIdx.x / kGroups, group = threadIdx.x % kGroups;
  const Reader<In> source(in, row0 + first, col0 + group * 8, kStep);
  const auto put = [&](unsigned i, const Row8<float>& y) {
#pragma unroll
    for (unsigned h = 0; h < 2; ++h) {
      *reinterpret_cast<uint4*>(tile + S::offset(i * kStep / kBlock, first + i * kStep % kBlock, group * 2 + h)) =
          make_uint4(y.v[h].w[0], y.v[h].w[1], y.v[h].w[2], y.v[h].w[3]);
    }
  };
  if constexpr (kTyped<In>) {
    each_row<S::kRows / kStep, 2>(source, [&](int i, const auto& raw) { put(i, source.row(i, raw)); }, [](int) {});
  } else {
#pragma unroll 1
    for (int i = 0; i < S::kRows / static_cast<int>(kStep); ++i) put(i, source.row(i, {}));
  }
}

// Returns block b of row r of a band.
template <typename T>
__device__ __forceinline__ Block<T> row_block(const uint8_t* tile, unsigned band, unsigned r, unsigned b) {
  constexpr int kPer = kBlock / Tile<T>::kPerChunk;
  Block<T> x;
#pragma unroll
  for (unsigned i = 0; i < kPer; ++i) {
    const uint4 u = *reinterpret_cast<const uint4*>(tile + Tile<T>::offset(band, r, b * kPer + i));
    x.w[4 * i] = u.x, x.w[4 * i + 1] = u.y, x.w[4 * i + 2] = u.z, x.w[4 * i + 3] = u.w;
  }
  return x;
}

// Loads the blocks of columns col and col + 1 (col even) in a band; `rotate`: their Hadamard transforms.
template <typename T>
__device__ __forceinline__ void column_blocks(const uint8_t* tile, unsigned band, unsigned col, bool rotate, bool signs,
                                              Block<T> (&x)[2]) {
  using S = Tile<T>;
  using Pair = std::conditional_t<sizeof(T) == 4, uint2, uint32_t>;
  const uint8_t* p = tile + S::offset(band, 0, col / S::kPerChunk) + col % S::kPerChunk * sizeof(T);
  Pair row[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) row[i] = *reinterpret_cast<const Pair*>(p + i * S::kPitch);
  if (rotate) {
    float z[2][kHadamard];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      if constexpr (sizeof(T) == 4) {
        z[0][i] = float_of(row[i].x), z[1][i] = float_of(row[i].y);
      } else {
        const float2 both = pair_floats<T>(row[i]);
        z[0][i] = both.x, z[1][i] = both.y;
      }
    }
    x[0] = rotated<T>(z[0], signs), x[1] = rotated<T>(z[1], signs);
    return;
  }
#pragma unroll
  for (int i = 0; i < Block<T>::kWords; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[0].w[i] = row[i].x, x[1].w[i] = row[i].y;
    } else {
      x[0].w[i] = __byte_perm(row[2 * i], row[2 * i + 1], 0x5410);
      x[1].w[i] = __byte_perm(row[2 * i], row[2 * i + 1], 0x7632);
    }
  }
}

// Writes the scales and payloads of two blocks of a copy, those of block i at `at[i]` (row-major) if there[i].
// `number[i]`: of block i in the whole tensor's copy.
template <typename T, bool kStochastic>
__device__ __forceinline__ void write_blocks(const Nvfp4Args& p, bool columnwise, const RandomBytes& random,
                                             const int64_t (&at)[2], const int64_t (&number)[2], const bool (&there)[2],
                                             const Block<T> (&x)[2], const float (&amax)[2],
                                             const TwoLevel (&level)[2]) {
  uint32_t r[2][4] = {};
  if constexpr (kStochastic) random.of_blocks(number, r);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t code = block_code(level[i], amax[i]);
    const uint2 q = encode_block<T, kStochastic>(x[i], amax[i], block_factor(level[i], code), r[i]);
    if (!there[i]) continue;
    (columnwise ? p.col_scale : p.row_scale)[at[i]] = static_cast<uint8_t>(code);
    store8((columnwise ? p.col : p.row) + at[i] * (kBlock / 2), q, columnwise ? p.vec_col : p.vec_row);
  }
}

// Thread blocks for which an SM has shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kResident = 4;
#else
constexpr int kResident = 6;
#endif

template <typename In, bool kStochastic, typename T = Held<In>>
__global__ void __launch_bounds__(Tile<T>::kThreads, kResident) nvfp4_kernel(const __grid_constant__ Nvfp4Args p) {
  using S = Tile<T>;
  __shared__ __align__(16) uint8_t tile[S::kRows * S::kPitch];
  __shared__ float square[S::kBands][kBlocks];  // p.square: amaxes of 16 x 16 squares
  __shared__ TwoLevel level[2];                 // factors of the rowwise and of the columnwise copy
  __shared__ Place place[2];                    // kStochastic: of the rowwise and of the columnwise copy
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t tile_m, tile_k;
  if (p.gathered) {
    p.strips.place(blockIdx.x, &tile_m, &tile_k);
  } else {  // Last tiles first: an amax pass has just left the end of x in L2.
    const unsigned index = gridDim.x - 1 - blockIdx.x;
    tile_m = index / p.tiles_k, tile_k = paired_tile<In>(p.in, index % p.tiles_k, p.tiles_k, kCols);
  }
  const int64_t row0 = static_cast<int64_t>(tile_m) * S::kRows, col0 = static_cast<int64_t>(tile_k) * kCols;
  if constexpr (kComputed<In>) {
    compute_tile<In>(p.in, tile, row0, col0);
  } else if (p.gathered) {
    gather_tile<T>(p, tile, row0, col0);
  } else {
    load_tile<T>(p, tile, row0, col0);
  }
  if constexpr (kStochastic) {
    if (threadIdx.x % 64 == 0) place[threadIdx.x / 64] = place_of(p.rng, p.part, p.m, p.k, threadIdx.x > 0);
  }
  if (threadIdx.x == 0 && p.row && !p.each_row) level[0] = two_level(*p.row_amax);
  if (threadIdx.x == 32 && p.col) level[1] = two_level(*p.col_amax);
  ptx::copy_async_wait();
  __syncthreads();

  const unsigned first = lane / kBlocks, b = lane % kBlocks;  // four rows at a time, eight blocks each
  if (p.square) {
    for (unsigned band = warp * S::kOwn; band < (warp + 1) * S::kOwn; ++band) {
      float m = 0.0f;
#pragma unroll
      for (unsigned r = 0; r < kBlock; r += 4) m = max_nan(m, amax_of(row_block<T>(tile, band, first + r, b)));
      m = max_nan(m, __shfl_xor_sync(kAllLanes, m, 8));
      m = max_nan(m, __shfl_xor_sync(kAllLanes, m, 16));
      if (lane < kBlocks) square[band][lane] = m;
    }
    __syncthreads();
  }
  RandomBytes random[2] = {};
  if constexpr (kStochastic) random[0] = random_bytes(p.rng, false), random[1] = random_bytes(p.rng, true);
  if (p.row && col0 + b * kBlock < p.k) {
    const int64_t blocks = p.k / kBlock;  // blocks of a row
#pragma unroll 1
    for (unsigned half = warp * S::kOwn * 2; half < (warp + 1) * S::kOwn * 2; ++half) {
      const unsigned band = half / 2, r0 = half % 2 * 8 + first;
      const int64_t row = row0 + band * kBlock + r0, at = row * blocks + col0 / kBlock + b;
      if (row >= p.m) break;
      const Block<T> x[2] = {row_block<T>(tile, band, r0, b), row_block<T>(tile, band, r0 + 4, b)};
      const bool second = row + 4 < p.m;
      float amax[2] = {square[band][b], square[band][b]};
      TwoLevel own[2] = {level[0], level[0]};
      if (!p.square) amax[0] = amax_of(x[0]), amax[1] = amax_of(x[1]);
      if (p.each_row) own[0] = two_level(p.row_amax[row]), own[1] = two_level(p.row_amax[second ? row + 4 : row]);
      const int64_t number = place[0].number(row, col0 / kBlock + b);
      write_blocks<T, kStochastic>(p, false, random[0], {at, at + 4 * blocks}, {number, number + 4 * place[0].stride},
                                   {true, second}, x, amax, own);
    }
  }
  constexpr bool kRotates = std::is_same_v<In, __nv_bfloat16> || kComputed<In>;
  const unsigned band = lane / S::kPairs;
  if (!p.col || row0 + band * kBlock >= p.m) return;
  const int64_t blocks = p.m / kBlock;  // blocks of a column
#pragma unroll 1
  for (unsigned col = (warp * S::kPairs + lane % S::kPairs) * 2; col < kCols; col += S::kWarps * S::kPairs * 2) {
    if (col0 + col >= p.k) return;
    Block<T> x[2];
    column_blocks<T>(tile, band, col, kRotates && p.rht, p.rht_signs, x);
    float amax[2] = {square[band][col / kBlock], square[band][col / kBlock]};
    if (!p.square) amax[0] = amax_of(x[0]), amax[1] = amax_of(x[1]);
    const int64_t at = (col0 + col) * blocks + row0 / kBlock + band;
    const int64_t number = place[1].number(col0 + col, row0 / kBlock + band);
    write_blocks<T, kStochastic>(p, true, random[1], {at, at + blocks}, {number, number + place[1].stride},
                                 {true, true}, x, amax, {level[1], level[1]});
  }
}

}  // namespace

Status quantize_nvfp4(const QuantizeArgs& args, const Execution& exec) {
  const QuantSpec& spec = args.spec;
  if (args.amax_mode == AmaxMode::compute) {
    const int32_t flags = spec.flags & (kRowAmax | kRht | kRhtSigns);
    DIPTYCH_TRY(cuda::amax({args.x, args.amax, args.columnwise_amax, flags, args.source}, exec));
  }
  Nvfp4Args p{};
  p.x = args.x.data, p.in = source_args(args.x, args.source), p.m = p.in.m, p.k = p.in.k;
  if (p.m == 0 || p.k == 0) return {};
  p.each_row = spec.has(kRowAmax), p.square = spec.has(kSquare);
  p.rht = spec.has(kRht), p.rht_signs = spec.has(kRhtSigns);
  p.vec_x = aligned(p.x, 16);
  if (spec.has(kStochastic)) p.rng = args.rng.as<const uint32_t>(), p.part = args.rng.numel() == 8;
  if (args.rowwise.given()) {
    p.row = args.rowwise.data.as<uint8_t>(), p.row_scale = args.rowwise.scale_inv.as<uint8_t>();
    p.row_amax = args.amax.as<const float>(), p.vec_row = aligned(p.row, 8);
  }
  if (args.columnwise.given()) {
    p.col = args.columnwise.data.as<uint8_t>(), p.col_scale = args.columnwise.scale_inv.as<uint8_t>();
    p.col_amax = args.columnwise_amax.as<const float>(), p.vec_col = aligned(p.col, 8);
  }
  p.gathered = p.in.kind == SourceKind::permuted && p.in.vec;
  const auto run = [&](auto type) {
    using S = Tile<Held<decltype(type)>>;
    const int64_t tiles_m = ceil_div(p.m, S::kRows), tiles_k = ceil_div(p.k, kCols), tiles = tiles_m * tiles_k;
    p.tiles_k = static_cast<unsigned>(tiles_k);
    if (p.gathered) p.strips = Strips(p.in, kCols, tiles_m, tiles_k);
    return spec.has(kStochastic)
               ? launch("quantize", nvfp4_kernel<decltype(type), true>, tiles, S::kThreads, 0, exec.stream, p)
               : launch("quantize", nvfp4_kernel<decltype(type), false>, tiles, S::kThreads, 0, exec.stream, p);
  };
  return p.gathered ? with_float_type(p.in.x.type, "quantize", run) : with_input_type(p.in, "quantize", run);
}

}  // namespace diptych::cuda
