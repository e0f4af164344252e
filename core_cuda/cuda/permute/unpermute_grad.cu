// dx[row] = p * dy[t], and dprobs[t, s] = dot(x[row], dy[t]). A token's dy is read once for each eight of its rows. The
// shape fixes the order of a dot product's sum: a thread sums groups of eight neighbours, then lanes are added, then
// warps.
#include "cuda/base/launch.cuh"
#include "cuda/permute/summands.cuh"

namespace diptych::cuda {
namespace {

constexpr int kBatch = 8;

struct UnpermuteGradParams {
  const void* dy;
  const void* x;  // null: no dprobs
  const int* row_id_map;
  AbsentRows absent;
  Probs probs, dprobs;
  RowBytes dx;  // only `out` is used
  int64_t tokens, width;
  int slots;
  bool vec;
};

// Stores prob times eight neighbours to columns c .. c + 7 of a row.
template <typename T>
__device__ __forceinline__ void store_scaled(T* row, int64_t width, int64_t c, bool vec, float prob, const Row8<T>& g) {
  constexpr int kN = Vec<T>::kCount;
  float y[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) y[j] = __fmul_rn(prob, g[j]);
  if (vec) {
#pragma unroll
    for (int i = 0; i < 8; i += kN) {
      float part[kN];
#pragma unroll
      for (int j = 0; j < kN; ++j) part[j] = y[i + j];
      *reinterpret_cast<uint4*>(row + c + i) = pack_vec<T>(part);
    }
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (c + j < width) row[c + j] = from_float<T>(y[j]);
    }
  }
}

template <typename T, int kGroup>
__global__ void __launch_bounds__(kBlock) unpermute_grad_kernel(const __grid_constant__ UnpermuteGradParams p) {
  using Group = TokenGroup<kGroup>;
  DIPTYCH_DYNAMIC_SHARED(raw);
  __shared__ float sums[kBlock / 32][kBatch];
  const int64_t token = Group::token(), first_slot = token * p.slots;
  const unsigned absent = p.absent.mask();
  const Summand* rows;
  const int count = list_summands<kGroup>(
      raw, p.row_id_map, p.tokens, p.slots, p.absent.rows, p.probs, &rows,
      [&](int slot, int) {
        if (p.dprobs.data != nullptr && p.x == nullptr) p.dprobs.store(first_slot + slot, 0.0f);  // no columns
      },
      [&](int slot) {
        if (p.dprobs.data != nullptr) p.dprobs.store(first_slot + slot, 0.0f);
      });
  const T *dy = static_cast<const T*>(p.dy), *x = static_cast<const T*>(p.x);
  T* dx = reinterpret_cast<T*>(p.dx.out);
  for (int i = 0; i < count; i += kBatch) {  // without a token count is 0
    float dot[kBatch] = {};
    for (int64_t c = Group::lane() * 8; c < p.width; c += kGroup * 8) {
      const Row8<T> g = load_row8(dy, p.tokens, p.width, token, c, p.vec);
      Row8<T> held[kBatch];
      if (x != nullptr) {
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          if (i + u < count) held[u] = load_row8(x, p.absent.rows, p.width, rows[i + u].row, c, p.vec);
        }
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (i + u >= count) continue;
        store_scaled(dx + rows[i + u].row * p.width, p.width, c, p.vec, rows[i + u].prob, g);
        if (x == nullptr) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) dot[u] = __fadd_rn(dot[u], __fmul_rn(held[u][j], g[j]));  // 0 past the end
      }
    }
    if (x == nullptr) continue;
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) dot[u] = __fadd_rn(dot[u], __shfl_xor_sync(kAllLanes, dot[u], mask));
      if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][u] = dot[u];
    }
    Group::sync();
    const int u = Group::lane();
    if (u < kBatch && i + u < count) {
      const int first = Group::index() * Group::kWarps;
      float s = sums[first][u];
#pragma unroll
      for (int w = 1; w < Group::kWarps; ++w) s = __fadd_rn(s, sums[first + w][u]);
      p.dprobs.store(first_slot + rows[i + u].slot, s);
    }
    Group::sync();
  }
  for (unsigned rest = absent; rest != 0; rest &= rest - 1) fill_row(p.dx, p.absent.row(__ffs(rest) - 1));
}

template <typename T, int kGroup>
Status run(UnpermuteGradParams& p, const Execution& exec) {
  const int64_t tokens = p.slots > 0 ? p.tokens : 0;  // without slots, tokens may be any number
  const int64_t blocks = blocks_for(tokens, p.absent.rows, TokenGroup<kGroup>::kTokens, &p.absent.each);
  if (blocks == 0) return {};
  return launch("unpermute_grad", unpermute_grad_kernel<T, kGroup>, blocks, kBlock, summand_bytes<kGroup>(p.slots),
                exec.stream, p);
}

}  // namespace

Status unpermute_grad(const UnpermuteGradArgs& args, const Execution& exec) {
  UnpermuteGradParams p{};
  p.dy = args.dy.data, p.x = args.dprobs.given() ? args.x.data : nullptr;
  p.row_id_map = args.row_id_map.as<const int>();
  p.absent.row_source = args.row_source.as<const int>(), p.absent.rows = static_cast<int>(args.row_source.numel());
  p.probs = {args.probs.data, args.probs.dtype}, p.dprobs = {args.dprobs.data, args.probs.dtype};
  p.tokens = args.row_id_map.rows(), p.width = args.dy.cols();
  p.slots = static_cast<int>(args.row_id_map.cols());
  const int64_t row_length = p.width * bytes(args.dy.dtype);
  p.dx = row_bytes(nullptr, args.dx.data, row_length, 0);
  p.vec = aligned(p.dy, 16) && aligned(p.dx.out, 16) && aligned(p.x, 16) && p.width % 8 == 0;
  return with_float_type(args.dy.dtype, "unpermute_grad", [&](auto type) {
    using T = decltype(type);
    return row_length >= kLongRow || p.slots > kWarpSlots ? run<T, kBlock>(p, exec) : run<T, 32>(p, exec);
  });
}

}  // namespace diptych::cuda
