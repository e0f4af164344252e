// Helpers of the kernels that move or sum rows: a group of threads for each token, its destinations, and absent rows.
#pragma once

#include "cuda/base/vector.cuh"
#include "diptych/format.h"
#include "diptych/permute.h"

namespace diptych::cuda {

constexpr int kBlock = 128;         // threads
constexpr int kAbsentRows = 32;     // most absent rows that one block fills: one bit of a word each
constexpr int64_t kLongRow = 2048;  // bytes: a block works on a token whose rows are this long or longer, else a warp
constexpr int kWarpSlots = 256;     // most slots of a token that one warp works on

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
  __device__ __forceinline__ static int index() { return threadIdx.x / kGroup; }  // this group's index in the block
  __device__ __forceinline__ static int64_t token() { return static_cast<int64_t>(blockIdx.x) * kTokens + index(); }
  __device__ __forceinline__ static void sync() {
    if constexpr (kGroup == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
  // Returns the number of slots that each warp reads.
  __device__ __forceinline__ static int span(int slots) { return (slots + kWarps * 32 - 1) / (kWarps * 32) * 32; }

  // Calls keep(position, slot, row) for each of the token's slots that has a row, and rest(slot) for the others.
  // Positions ascend with the slots from warp() * span(slots) on. Returns how many slots this warp keeps.
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

// Probabilities of a dtype that is known at run time.
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

// Loads a value of `size` bytes (2, 4 or 8) as bits. It is an ordinary load, not __ldg, since permute may wait for an
// earlier grid that writes it.
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

// Rows of bytes. `unit`: the largest of 16, 4 and 1 that divides both addresses and the row length.
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

// Calls f(V{}) with a type V of `unit` bytes.
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

// Returns element i of an absent row.
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

// Absent rows are distributed over all blocks in turn, `each` rows of the destination to a block: they lie together at
// the end of each expert's region, and one block would take too long to fill them.
struct AbsentRows {
  const int* row_source;
  int rows, each;

  // Returns the row of bit i of a mask.
  __device__ __forceinline__ int64_t row(int i) const { return static_cast<int64_t>(i) * gridDim.x + blockIdx.x; }
  // ask() loads `row_source` for this lane's row; mask() gathers from all lanes a bit for each absent row. Call ask()
  // before work that hides its latency. It is an ordinary load, as in load_bits.
  __device__ __forceinline__ int ask() const {
    const int bit = threadIdx.x % 32;
    const int64_t at = row(bit);
    return bit < each && at < rows ? row_source[at] : 0;
  }
  __device__ __forceinline__ static unsigned mask(int asked) { return __ballot_sync(kAllLanes, asked < 0); }
  __device__ __forceinline__ unsigned mask() const { return mask(ask()); }
};

// Absent rows, distributed over warps. Construct it before work that hides the latency of its first load.
class AbsentOfWarp {
 public:
  __device__ __forceinline__ AbsentOfWarp(const int* row_source, uint32_t rows, uint32_t warp, uint32_t warps)
      : row_source_(row_source), rows_(rows), warp_(warp), warps_(warps), asked_(ask(warp)) {}
  template <typename F>  // calls f(row) with all lanes of the warp
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

// Returns the number of blocks for so many tokens and rows, and sets *each to the number of rows that a block checks.
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
