// permute: rows are moved as bytes. Each warp reads a part of a token's row once and writes it to all of the token's
// destinations. The same launch fills absent rows. Stores are ordinary, not streaming: L2 then gathers the writes to k
// places, which is faster. slices.cu has the kernel for large tensors.
#include "cuda/base/launch.cuh"
#include "cuda/permute/rows.cuh"
#include "cuda/ptx/grid.cuh"

namespace diptych::cuda {
namespace {

constexpr int kWarps = kBlock / 32;

// Elements of a row that a thread holds: one of 16 bytes, since many short stores near each other are faster than few
// long ones; several smaller ones, because each warp reads the map and should move enough for it.
template <bool kWide>
constexpr int kHeld = kWide ? 1 : 4;

struct PermuteParams {
  RowBytes planes[kMaxPlanes];
  int64_t ends[kMaxPlanes];  // number of parts of a token's row in this plane and all earlier ones
  int64_t parts;             // number of parts in all planes, at least 1
  int plane_count;
  const int* row_id_map;
  AbsentRows absent;
  const void* probs;
  void* permuted_probs;
  int prob_bytes;             // 0: none
  bool zero_prob_is_padding;  // implies that there are probs
  int64_t tokens;
  int slots;
};

// Moves part `part` of the token's row in plane `r`; `moves_probs`: this warp moves the token's probabilities too. They
// are loaded before the rows are stored, and stored after them, which hides their latency. It takes kMapRegs * 32 slots
// at once.
template <typename V, bool kWide, int kMapRegs>
__device__ __forceinline__ void move_part(const PermuteParams& p, const RowBytes& r, int64_t token, int64_t part,
                                          bool moves_probs) {
  const int lane = threadIdx.x % 32;
  constexpr int kElements = kHeld<kWide>, kPart = 32 * kElements;
  const int64_t first = part * kPart + lane;
  const int left = static_cast<int>(min(r.bytes / static_cast<int64_t>(sizeof(V)) - first, int64_t{kPart}));
  const V* in = reinterpret_cast<const V*>(r.in + token * r.bytes) + first;
  V v[kElements];
#pragma unroll
  for (int u = 0; u < kElements; ++u) {
    if (u * 32 < left) v[u] = ptx::load_once(in + u * 32);
  }
  const int64_t entry = token * p.slots + lane;
  for (int s0 = 0; s0 < p.slots; s0 += 32 * kMapRegs) {
    int row[kMapRegs];
#pragma unroll
    for (int j = 0; j < kMapRegs; ++j) {
      const int s = s0 + j * 32;
      row[j] = s + lane < p.slots ? p.row_id_map[entry + s] : -1;
    }
    auto exists = [&](int j) { return static_cast<unsigned>(row[j]) < static_cast<unsigned>(p.absent.rows); };
    uint64_t bits[kMapRegs];
    if (moves_probs || p.zero_prob_is_padding) {
#pragma unroll
      for (int j = 0; j < kMapRegs; ++j)
        bits[j] = exists(j) ? load_bits(p.probs, entry + s0 + j * 32, p.prob_bytes) : 0;
    }
#pragma unroll
    for (int j = 0; j < kMapRegs; ++j) {
      unsigned padding = 0;
      if (p.zero_prob_is_padding) {
        const uint64_t sign = uint64_t{1} << (8 * p.prob_bytes - 1);
        padding = __ballot_sync(kAllLanes, (bits[j] & ~sign) == 0);
      }
      for (unsigned rest = __ballot_sync(kAllLanes, exists(j)); rest != 0; rest &= rest - 1) {
        const int from = __ffs(rest) - 1, to = __shfl_sync(kAllLanes, row[j], from);
        V* out = reinterpret_cast<V*>(r.out + to * r.bytes) + first;
        if (padding >> from & 1) {
#pragma unroll
          for (int u = 0; u < kElements; ++u) {
            if (u * 32 < left) out[u * 32] = fill_of<V>(r.fill, lane);  // the same as for element first + u * 32
          }
        } else {
#pragma unroll
          for (int u = 0; u < kElements; ++u) {
            if (u * 32 < left) out[u * 32] = v[u];
          }
        }
      }
    }
    if (moves_probs) {
#pragma unroll
      for (int j = 0; j < kMapRegs; ++j) {
        if (exists(j)) store_bits(p.permuted_probs, row[j], p.prob_bytes, bits[j]);
      }
    }
  }
}

// kWide: every plane's unit is 16.
template <bool kWide, int kMapRegs>
__global__ void __launch_bounds__(kBlock) permute_kernel(const __grid_constant__ PermuteParams p) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32, token = item / p.parts;
  int64_t part = item - token * p.parts;
  const bool moves_probs = p.prob_bytes != 0 && part == 0;
  int plane = 0;
  while (plane + 1 < p.plane_count && part >= p.ends[plane]) ++plane;
  if (plane > 0) part -= p.ends[plane - 1];
  ptx::wait_for_grid_before();
  int asked = p.absent.ask();
  if (token < p.tokens) {
    const RowBytes& r = p.planes[plane];
    if constexpr (kWide) {
      move_part<uint4, true, kMapRegs>(p, r, token, part, moves_probs);
    } else {
      with_unit(r, [&](auto v) { move_part<decltype(v), false, kMapRegs>(p, r, token, part, moves_probs); });
    }
  }
  asm volatile("" : "+r"(asked));  // keeps the compiler from using it earlier, where the rows would wait for it
  for (unsigned rest = p.absent.mask(asked); rest != 0; rest &= rest - 1) {
    const int64_t row = p.absent.row(__ffs(rest) - 1);
    for (int i = 0; i < p.plane_count; ++i) fill_row(p.planes[i], row);
    if (p.prob_bytes != 0 && threadIdx.x == 0) store_bits(p.permuted_probs, row, p.prob_bytes, 0);
  }
}

}  // namespace

Status permute(const PermuteArgs& args, const Execution& exec) {
  PermuteParams p{};
  bool wide = true;
  for (int i = 0; i < args.plane_count; ++i) {
    p.planes[i] = row_bytes(args.planes[i]);
    wide = wide && p.planes[i].unit == 16;
  }
  const int part = 32 * (wide ? kHeld<true> : kHeld<false>);  // elements of a row that a warp takes
  for (int i = 0; i < args.plane_count; ++i) {
    p.parts += ceil_div(p.planes[i].bytes, part * p.planes[i].unit);
    p.ends[i] = p.parts;
  }
  if (p.parts == 0) p.parts = 1;  // rows without columns still have probabilities
  p.plane_count = args.plane_count;
  p.row_id_map = args.row_id_map.as<const int>();
  p.tokens = args.row_id_map.rows(), p.slots = static_cast<int>(args.row_id_map.cols());
  const int64_t rows = args.row_source.numel();
  p.absent.row_source = args.row_source.as<const int>(), p.absent.rows = static_cast<int>(rows);
  p.prob_bytes = args.probs.given() ? bytes(args.probs.dtype) : 0;
  p.probs = args.probs.data, p.permuted_probs = args.permuted_probs.data;
  p.zero_prob_is_padding = args.zero_prob_is_padding && p.prob_bytes != 0;
  const int64_t tokens = p.slots > 0 ? p.tokens : 0;  // without slots, tokens may be any number
  const int64_t blocks = blocks_for(tokens * p.parts, rows, kWarps, &p.absent.each);
  if (blocks == 0) return {};
  auto run = [&](auto kernel) { return launch_after("permute", kernel, blocks, kBlock, 0, exec, p); };
  if (!wide) return p.slots <= 32 ? run(permute_kernel<false, 1>) : run(permute_kernel<false, 8>);
  return p.slots <= 32   ? run(permute_kernel<true, 1>)
         : p.slots <= 64 ? run(permute_kernel<true, 2>)
                         : run(permute_kernel<true, 8>);
}

}  // namespace diptych::cuda
