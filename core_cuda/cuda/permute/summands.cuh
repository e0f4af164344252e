// Lists a token's rows in ascending order in shared memory, each with its factor.
#pragma once

#include "cuda/permute/rows.cuh"

namespace diptych::cuda {

struct Summand {
  int row, slot;
  float prob;
};

// Returns the bytes of shared memory of a block whose tokens have so many slots.
template <int kGroup>
size_t summand_bytes(int slots) {
  return TokenGroup<kGroup>::kTokens * static_cast<size_t>(slots) * (sizeof(Summand) + sizeof(Destination));
}

// Lists the token's summands in *out and returns their number. Equal rows keep the order of their slots. keep(slot,
// row) and rest(slot) are called as in TokenGroup::collect. All threads of the block call it.
template <int kGroup, typename Keep, typename Rest>
__device__ __forceinline__ int list_summands(unsigned char* shared, const int* row_id_map, int64_t tokens, int slots,
                                             int rows, const Probs& probs, const Summand** out, Keep&& keep,
                                             Rest&& rest) {
  using Group = TokenGroup<kGroup>;
  __shared__ int counts[kBlock / 32];
  const int64_t token = Group::token();
  Summand* sorted = reinterpret_cast<Summand*>(shared) + Group::index() * slots;
  Destination* found = reinterpret_cast<Destination*>(reinterpret_cast<Summand*>(shared) + Group::kTokens * slots) +
                       Group::index() * slots;
  int kept = 0;
  if (token < tokens) {
    kept = Group::collect(
        row_id_map + token * slots, slots, rows,
        [&](int position, int slot, int row) {
          found[position] = {row, slot};
          keep(slot, row);
        },
        rest);
  }
  int* count = counts + Group::index() * Group::kWarps;
  if (threadIdx.x % 32 == 0) count[Group::warp()] = kept;
  Group::sync();
  const int span = Group::span(slots);
  int total = 0;
#pragma unroll
  for (int w = 0; w < Group::kWarps; ++w) total += count[w];
  for (int i = Group::lane(); i < total; i += kGroup) {
    int w = 0, at = i;
    while (at >= count[w]) at -= count[w++];
    at += w * span;
    const Destination own = found[at];
    const float prob = probs.data != nullptr ? probs.load(token * slots + own.slot) : 1.0f;
    int before = 0;
#pragma unroll
    for (int v = 0; v < Group::kWarps; ++v) {
      for (int j = v * span; j < v * span + count[v]; ++j) {
        const int other = found[j].row;
        before += other < own.row || (other == own.row && j < at) ? 1 : 0;
      }
    }
    sorted[before] = {own.row, own.slot, prob};
  }
  Group::sync();
  *out = sorted;
  return total;
}

// Packs kCount elements into 16 bytes.
template <typename T>
__device__ __forceinline__ uint4 pack_vec(const float (&v)[Vec<T>::kCount]) {
  if constexpr (sizeof(T) == 4) {
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
  } else {
    return make_uint4(pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]), pack2<T>(v[4], v[5]), pack2<T>(v[6], v[7]));
  }
}

}  // namespace diptych::cuda
