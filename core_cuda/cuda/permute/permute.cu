// Rows moved as bytes: each token's row is read once and written to all of its destinations. The same launch fills the
// rows that nobody writes.
#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/permute/rows.cuh"

namespace diptych::cuda {
namespace {

constexpr int kUnroll = 4;  // vectors that a thread holds at once
constexpr unsigned kPadding = 1u << 31;

struct PermuteParams {
  RowBytes planes[kMaxPlanes];
  int plane_count;
  const int* row_id_map;
  AbsentRows absent;
  const void* probs;
  void* permuted_probs;
  int prob_bytes;  // 0: none
  bool zero_prob_is_padding;
  int64_t tokens;
  int slots;
};

// A thread's part of a row: every kGroup-th vector from `first` on.
template <typename V, int kGroup>
struct Piece {
  V v[kUnroll];

  __device__ __forceinline__ void load(const V* row, int64_t first, int64_t n) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kGroup < n) v[u] = __ldcs(row + first + u * kGroup);
    }
  }
  __device__ __forceinline__ void store(V* row, int64_t first, int64_t n) const {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kGroup < n) __stcs(row + first + u * kGroup, v[u]);
    }
  }
  __device__ __forceinline__ static void fill(V* row, int64_t first, int64_t n, uint32_t with) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kGroup < n) __stcs(row + first + u * kGroup, fill_of<V>(with, first + u * kGroup));
    }
  }
};

// One token's destinations as its group listed them: each warp's share from warp * span on, kPadding beside the row.
template <int kGroup>
struct Listed {
  const unsigned* list;
  const int* counts;
  int span;

  template <typename F>
  __device__ __forceinline__ void each(F&& f) const {
#pragma unroll
    for (int w = 0; w < TokenGroup<kGroup>::kWarps; ++w) {
      for (int i = 0; i < counts[w]; ++i) f(list[w * span + i]);
    }
  }
};

// `head`: the first piece, already loaded; null: not.
template <typename V, int kGroup>
__device__ __forceinline__ void move_row(const RowBytes& r, int64_t token, const Listed<kGroup>& to,
                                         const Piece<V, kGroup>* head) {
  const int64_t n = r.bytes / static_cast<int64_t>(sizeof(V));
  const V* in = reinterpret_cast<const V*>(r.in + token * r.bytes);
  const int lane = TokenGroup<kGroup>::lane();
  for (int64_t first = lane; first < n; first += kGroup * kUnroll) {
    Piece<V, kGroup> piece;
    if (head != nullptr && first == lane) {
      piece = *head;
    } else {
      piece.load(in, first, n);
    }
    to.each([&](unsigned entry) {
      V* out = reinterpret_cast<V*>(r.out + static_cast<int64_t>(entry & ~kPadding) * r.bytes);
      if (entry & kPadding) {
        Piece<V, kGroup>::fill(out, first, n, r.fill);
      } else {
        piece.store(out, first, n);
      }
    });
  }
}

template <int kGroup>
__global__ void __launch_bounds__(kBlock) permute_kernel(const __grid_constant__ PermuteParams p) {
  using Group = TokenGroup<kGroup>;
  DIPTYCH_DYNAMIC_SHARED(raw);
  __shared__ int counts[kBlock / 32];
  const int64_t token = Group::token();
  const unsigned absent = p.absent.mask();
  Piece<uint4, kGroup> head;  // on its way while the destinations are listed
  const bool there = token < p.tokens, wide = p.planes[0].unit == 16;
  if (there && wide) {
    const RowBytes& r = p.planes[0];
    head.load(reinterpret_cast<const uint4*>(r.in + token * r.bytes), Group::lane(), r.bytes / 16);
  }

  unsigned* list = reinterpret_cast<unsigned*>(raw) + Group::index() * p.slots;
  int kept = 0;
  if (there) {
    kept = Group::collect(
        p.row_id_map + token * p.slots, p.slots, p.absent.rows,
        [&](int position, int slot, int row) {
          unsigned entry = static_cast<unsigned>(row);
          if (p.prob_bytes != 0) {
            const uint64_t bits = load_bits(p.probs, token * p.slots + slot, p.prob_bytes);
            store_bits(p.permuted_probs, row, p.prob_bytes, bits);
            const bool zero = (bits & ~(uint64_t{1} << (8 * p.prob_bytes - 1))) == 0;
            if (zero && p.zero_prob_is_padding) entry |= kPadding;
          }
          list[position] = entry;
        },
        [](int) {});
  }
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = kept;
  Group::sync();

  if (there) {
    const Listed<kGroup> to{list, counts + Group::index() * Group::kWarps, Group::span(p.slots)};
    if (wide) {
      move_row<uint4, kGroup>(p.planes[0], token, to, &head);
    }
    for (int i = wide ? 1 : 0; i < p.plane_count; ++i) {
      with_unit(p.planes[i], [&](auto v) { move_row<decltype(v), kGroup>(p.planes[i], token, to, nullptr); });
    }
  }
  for (unsigned rest = absent; rest != 0; rest &= rest - 1) {
    const int64_t row = p.absent.first() + __ffs(rest) - 1;
    for (int i = 0; i < p.plane_count; ++i) fill_row(p.planes[i], row);
    if (p.prob_bytes != 0 && threadIdx.x == 0) store_bits(p.permuted_probs, row, p.prob_bytes, 0);
  }
}

template <int kGroup>
Status run(PermuteParams& p, int64_t rows, const Execution& exec) {
  constexpr int kTokens = TokenGroup<kGroup>::kTokens;
  const int64_t blocks = blocks_for(p.tokens, rows, kTokens, &p.absent.each);
  if (blocks == 0) return {};
  return launch("permute", permute_kernel<kGroup>, blocks, kBlock,
                static_cast<size_t>(kTokens) * p.slots * sizeof(unsigned), exec.stream, p);
}

}  // namespace

Status permute(const PermuteArgs& args, const Execution& exec) {
  PermuteParams p{};
  int64_t longest = 0;
  for (int i = 0; i < args.plane_count; ++i) {
    const Plane& plane = args.planes[i];
    p.planes[i] = row_bytes(plane.in.data, plane.out.data, plane_row_bytes(plane.in), plane.fill);
    longest = std::max(longest, p.planes[i].bytes);
  }
  p.plane_count = args.plane_count;
  p.row_id_map = args.row_id_map.as<const int>();
  p.tokens = args.row_id_map.rows(), p.slots = static_cast<int>(args.row_id_map.cols());
  const int64_t rows = args.source.numel();
  p.absent.source = args.source.as<const int>(), p.absent.rows = static_cast<int>(rows);
  p.prob_bytes = args.probs.given() ? bytes(args.probs.dtype) : 0;
  p.probs = args.probs.data, p.permuted_probs = args.permuted_probs.data;
  p.zero_prob_is_padding = args.zero_prob_is_padding;
  return longest >= kLongRow || p.slots > kWarpSlots ? run<kBlock>(p, rows, exec) : run<32>(p, rows, exec);
}

}  // namespace diptych::cuda
