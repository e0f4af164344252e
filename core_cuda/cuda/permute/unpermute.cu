// y[t] = sum over the token's rows, ascending, of p * x[row] in float32, each operation rounded.
#include "cuda/base/launch.cuh"
#include "cuda/permute/summands.cuh"

namespace diptych::cuda {
namespace {

constexpr int kBatch = 8;  // rows whose loads are in flight at once

struct UnpermuteParams {
  const void* x;
  void* y;
  const int* row_id_map;
  Probs probs;  // null data: none
  const void* permuted_dprobs;
  void* dprobs;
  int dprob_bytes;  // 0: none
  int64_t tokens, width;
  int slots, rows;
  bool vec;
};

// Computes elements c .. c + kN - 1 of the sum; kN is 1 or a whole vector.
template <typename T, int kN>
__device__ __forceinline__ void sum_rows(const T* x, int64_t width, int64_t c, const Summand* rows, int count,
                                         float (&acc)[kN]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) acc[j] = 0.0f;
  for (int i = 0; i < count; i += kBatch) {
    Vec<T> v[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (i + u >= count) continue;
      const T* from = x + rows[i + u].row * width + c;
      if constexpr (kN == 1) {
        if constexpr (sizeof(T) == 4) v[u].w[0] = __builtin_bit_cast(uint32_t, *from);
        if constexpr (sizeof(T) == 2) v[u].w[0] = __builtin_bit_cast(unsigned short, *from);
      } else {
        v[u] = Vec<T>::load(from);
      }
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (i + u >= count) continue;
      const float p = rows[i + u].prob;
#pragma unroll
      for (int j = 0; j < kN; ++j) acc[j] = __fadd_rn(acc[j], __fmul_rn(p, v[u][j]));
    }
  }
}

template <typename T, int kGroup>
__global__ void __launch_bounds__(kBlock) unpermute_kernel(const __grid_constant__ UnpermuteParams p) {
  using Group = TokenGroup<kGroup>;
  DIPTYCH_DYNAMIC_SHARED(raw);
  const int64_t token = Group::token(), first_slot = token * p.slots;
  const Summand* rows;
  const int count = list_summands<kGroup>(
      raw, p.row_id_map, p.tokens, p.slots, p.rows, p.probs, &rows,
      [&](int slot, int row) {
        if (p.dprob_bytes == 0) return;
        store_bits(p.dprobs, first_slot + slot, p.dprob_bytes, load_bits(p.permuted_dprobs, row, p.dprob_bytes));
      },
      [&](int slot) {
        if (p.dprob_bytes != 0) store_bits(p.dprobs, first_slot + slot, p.dprob_bytes, 0);
      });
  if (token >= p.tokens) return;
  const T* x = static_cast<const T*>(p.x);
  T* y = static_cast<T*>(p.y) + token * p.width;
  if (p.vec) {
    constexpr int kN = Vec<T>::kCount;
    for (int64_t c = Group::lane() * kN; c < p.width; c += kGroup * kN) {
      float acc[kN];
      sum_rows<T, kN>(x, p.width, c, rows, count, acc);
      __stcs(reinterpret_cast<uint4*>(y + c), pack_vec<T>(acc));
    }
  } else {
    for (int64_t c = Group::lane(); c < p.width; c += kGroup) {
      float acc[1];
      sum_rows<T, 1>(x, p.width, c, rows, count, acc);
      y[c] = from_float<T>(acc[0]);
    }
  }
}

template <typename T, int kGroup>
Status run(const UnpermuteParams& p, const Execution& exec) {
  return launch("unpermute", unpermute_kernel<T, kGroup>, ceil_div(p.tokens, TokenGroup<kGroup>::kTokens), kBlock,
                summand_bytes<kGroup>(p.slots), exec.stream, p);
}

}  // namespace

Status unpermute(const UnpermuteArgs& args, const Execution& exec) {
  UnpermuteParams p{};
  p.x = args.x.data, p.y = args.y.data, p.row_id_map = args.row_id_map.as<const int>();
  p.probs = {args.probs.data, args.probs.dtype};
  p.permuted_dprobs = args.permuted_dprobs.data, p.dprobs = args.dprobs.data;
  p.dprob_bytes = args.dprobs.given() ? bytes(args.dprobs.dtype) : 0;
  p.tokens = args.row_id_map.rows(), p.width = args.x.cols();
  p.slots = static_cast<int>(args.row_id_map.cols()), p.rows = static_cast<int>(args.x.rows());
  if (p.tokens == 0 || (p.width == 0 && p.slots == 0)) return {};
  const int64_t row_length = p.width * bytes(args.x.dtype);
  p.vec = aligned(p.x, 16) && aligned(p.y, 16) && row_length % 16 == 0;
  return with_float_type(args.x.dtype, "unpermute", [&](auto type) {
    using T = decltype(type);
    return row_length >= kLongRow || p.slots > kWarpSlots ? run<T, kBlock>(p, exec) : run<T, 32>(p, exec);
  });
}

}  // namespace diptych::cuda
