// What the kernels share that move or sum rows: a group of threads for each token, its destinations, and absent rows.
#pragma once

#include "cuda/base/vector.cuh"
#include "diptych/format.h"
#include "diptych/permute.h"

namespace diptych::cuda {

constexpr int kBlock = 128;         // threads
constexpr int kAbsentRows = 32;     // that one block fills, at most: a bit of a word each
constexpr int64_t kLongRow = 2048;  // bytes; a whole block works on a token whose row is as long, else a warp
constexpr int kWarpSlots = 256;     // of a token that a warp alone works on, at most

struct Destination {
  int row, slot;
};

// The threads that work on one token, all in one block: kGroup is 32 or kBlock.
template <int kGroup>
struct TokenGroup {
  static constexpr int kWarps = kGroup / 32, kTokens = kBlock / kGroup;
  static_assert(kGroup == 32 || kGroup == kBlock);

  __device__ __forceinline__ static int lane() { return threadIdx.x % kGroup; }
  __device__ __forceinline__ static int warp() { return threadIdx.x % kGroup / 32; }
  __device__ __forceinline__ static int index() { return threadIdx.x / kGroup; }  // among the block's groups
  __device__ __forceinline__ static int64_t token() { return static_cast<int64_t>(blockIdx.x) * kTokens + index(); }
  __device__ __forceinline__ static void sync() {
    if constexpr (kGroup == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
  // Slots that each warp looks through
  __device__ __forceinline__ static int span(int slots) { return (slots + kWarps * 32 - 1) / (kWarps * 32) * 32; }

  // keep(position, slot, row) for each of the token's slots that has a row, rest(slot) for the others. Positions
  // ascend with the slots from warp() * span(slots) on; returns how many this warp keeps.
  template <typename Keep, typename Rest>
  __device__ __forceinline__ static int collect(const int* map, int slots, int rows, Keep&& keep, Rest&& rest) {
    const int first = warp() * span(slots), last = min(slots, first + span(slots)), bit = threadIdx.x % 32;
    int kept = 0;
    for (int s0 = first; s0 < last; s0 += 32) {
      const int s = s0 + bit, row = s < last ? __ldg(map + s) : -1;
      const bool exists = static_cast<unsigned>(row) < static_cast<unsigned>(rows);
      const unsigned mask = __ballot_sync(kAllLanes, exists);
      if (exists) {
        keep(first + kept + __popc(mask & ((1u << bit) - 1)), s, row);
      } else if (s < last) {
        rest(s);
      }
      kept += __popc(mask);
    }
    return kept;
  }
};

// Probabilities of whatever dtype.
struct Probs {
  void* data;
  DType dtype;

  __device__ __forceinline__ float load(int64_t i) const {
    if (dtype == DType::f32) return __ldg(static_cast<const float*>(data) + i);
    const unsigned short bits = __ldg(static_cast<const unsigned short*>(data) + i);
    if (dtype == DType::bf16) return float_of(static_cast<uint32_t>(bits) << 16);
    return __half2float(__ushort_as_half(bits));
  }
  __device__ __forceinline__ void store(int64_t i, float v) const {
    if (dtype == DType::f32) {
      static_cast<float*>(data)[i] = v;
    } else if (dtype == DType::bf16) {
      static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(v);
    } else {
      static_cast<__half*>(data)[i] = __float2half_rn(v);
    }
  }
};

// A value of `size` bytes, 2, 4 or 8, moved as it is. An ordinary load: permute waits for an earlier grid's.
__device__ __forceinline__ uint64_t load_bits(const void* p, int64_t i, int size) {
  if (size == 2) return static_cast<const unsigned short*>(p)[i];
  if (size == 4) return static_cast<const unsigned*>(p)[i];
  return static_cast<const unsigned long long*>(p)[i];
}
__device__ __forceinline__ void store_bits(void* p, int64_t i, int size, uint64_t v) {
  if (size == 2) {
    static_cast<unsigned short*>(p)[i] = static_cast<unsigned short>(v);
  } else if (size == 4) {
    static_cast<unsigned*>(p)[i] = static_cast<unsigned>(v);
  } else {
    static_cast<unsigned long long*>(p)[i] = v;
  }
}

// Rows of bytes. `unit`: 16, 4 or 1, which divides addresses and row lengths.
struct RowBytes {
  const uint8_t* in;
  uint8_t* out;
  int64_t bytes;
  uint32_t fill;
  int unit;
};

inline RowBytes row_bytes(const void* in, void* out, int64_t bytes, uint32_t fill) {
  const auto all = reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out) | static_cast<uintptr_t>(bytes);
  return {static_cast<const uint8_t*>(in), static_cast<uint8_t*>(out), bytes, fill,
          all % 16 == 0  ? 16
          : all % 4 == 0 ? 4
                         : 1};
}

inline RowBytes row_bytes(const Plane& p) { return row_bytes(p.in.data, p.out.data, plane_row_bytes(p.in), p.fill); }

// f(V{}) with the widest type that a row is whole numbers of.
template <typename F>
__device__ __forceinline__ void with_unit(const RowBytes& r, F&& f) {
  if (r.unit == 16) {
    f(uint4{});
  } else if (r.unit == 4) {
    f(0u);
  } else {
    f(static_cast<unsigned char>(0));
  }
}

// Element i of an absent row.
template <typename V>
__device__ __forceinline__ V fill_of(uint32_t fill, int64_t i) {
  if constexpr (sizeof(V) == 16) {
    return make_uint4(fill, fill, fill, fill);
  } else if constexpr (sizeof(V) == 4) {
    return fill;
  } else {
    return static_cast<unsigned char>(fill >> (i % 4 * 8));
  }
}

// Rows of a destination without a source are dealt out to all blocks in turn, `each` to a block: they lie together, at
// the end of each expert's, and a block that had them all would be late.
struct AbsentRows {
  const int* row_source;
  int rows, each;

  // The row that bit i of a mask stands for.
  __device__ __forceinline__ int64_t row(int i) const { return static_cast<int64_t>(i) * gridDim.x + blockIdx.x; }
  // What `row_source` says of the row that this lane looks at, and from all lanes the rows that are absent, a bit each.
  // Asked for before the work that hides the wait; an ordinary load, as in load_bits.
  __device__ __forceinline__ int ask() const {
    const int bit = threadIdx.x % 32;
    const int64_t at = row(bit);
    return bit < each && at < rows ? row_source[at] : 0;
  }
  __device__ __forceinline__ static unsigned mask(int asked) { return __ballot_sync(kAllLanes, asked < 0); }
  __device__ __forceinline__ unsigned mask() const { return mask(ask()); }
};

// The same, dealt out to warps. Made before the work that hides the wait for the first rows' sources.
class AbsentOfWarp {
 public:
  __device__ __forceinline__ AbsentOfWarp(const int* row_source, uint32_t rows, uint32_t warp, uint32_t warps)
      : row_source_(row_source), rows_(rows), warp_(warp), warps_(warps), asked_(ask(warp)) {}
  template <typename F>  // f(row) by whole warps
  __device__ __forceinline__ void each(F&& f) {
    for (uint32_t base = warp_; base < rows_; base += warps_ * 32) {
      if (base != warp_) asked_ = ask(base);
      for (unsigned absent = AbsentRows::mask(asked_); absent != 0; absent &= absent - 1)
        f(base + static_cast<uint64_t>(__ffs(absent) - 1) * warps_);
    }
  }

 private:
  __device__ __forceinline__ int ask(uint32_t base) const {
    const uint32_t row = base + threadIdx.x % 32 * warps_;
    return row < rows_ ? row_source_[row] : 0;
  }
  const int* row_source_;
  uint32_t rows_, warp_, warps_;
  int asked_;
};

// Blocks for so many tokens and rows, and how many rows each looks after.
inline int64_t blocks_for(int64_t tokens, int64_t rows, int tokens_a_block, int* each) {
  const int64_t for_tokens = ceil_div(tokens, tokens_a_block), for_rows = ceil_div(rows, kAbsentRows);
  const int64_t blocks = for_tokens > for_rows ? for_tokens : for_rows;
  *each = blocks > 0 ? static_cast<int>(ceil_div(rows, blocks)) : 0;
  return blocks;
}

__device__ __forceinline__ void fill_row(const RowBytes& r, int64_t row) {
  with_unit(r, [&](auto v) {
    using V = decltype(v);
    V* out = reinterpret_cast<V*>(r.out + row * r.bytes);
    for (int64_t i = threadIdx.x; i < r.bytes / static_cast<int64_t>(sizeof(V)); i += kBlock)
      out[i] = fill_of<V>(r.fill, i);
  });
}

}  // namespace diptych::cuda
