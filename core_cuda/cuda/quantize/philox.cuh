// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and how stochastic rounding
// draws from it.
#pragma once

#include "cuda/base/codec.cuh"

namespace diptych::cuda {

struct PhiloxKey {
  uint32_t k0, k1;
};

// Replaces each of kN counters by its random words. They share the key schedule.
template <int kN>
DIPTYCH_HD void philox(PhiloxKey key, uint32_t (&c)[kN][4]) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c[i][0], b = static_cast<uint64_t>(0xCD9E8D57u) * c[i][2];
      c[i][0] = static_cast<uint32_t>(b >> 32) ^ c[i][1] ^ key.k0, c[i][1] = static_cast<uint32_t>(b);
      c[i][2] = static_cast<uint32_t>(a >> 32) ^ c[i][3] ^ key.k1, c[i][3] = static_cast<uint32_t>(a);
    }
    key.k0 += 0x9E3779B9u, key.k1 += 0xBB67AE85u;
  }
}

// The seed and the offset of a copy's random bytes (NUMERICS 5).
struct RandomBytes {
  PhiloxKey key;
  uint32_t offset_lo, offset_hi;

  // Sets r[i] to the bytes of block b[i]: of elements 16 b .. 16 b + 15 of the whole tensor's copy.
  template <int kN>
  DIPTYCH_HD void of_blocks(const int64_t (&b)[kN], uint32_t (&r)[kN][4]) const {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      r[i][0] = static_cast<uint32_t>(b[i]), r[i][1] = static_cast<uint32_t>(b[i] >> 32);
      r[i][2] = offset_lo, r[i][3] = offset_hi;
    }
    philox(key, r);
  }
};

// `rng` holds the low and high words of seed and offset; the columnwise copy draws at the next offset. All threads of a
// warp must call this: a reduction puts the words into uniform registers, in which the key schedule takes no time of
// the vector units.
__device__ __forceinline__ RandomBytes random_bytes(const uint32_t* rng, bool columnwise) {
  const auto word = [&](int i) { return __reduce_or_sync(0xffffffff, rng[i]); };
  const uint32_t lo = word(2) + columnwise;
  return {{word(0), word(1)}, lo, word(3) + (columnwise && lo == 0)};
}

// Where the blocks of a copy are in the whole tensor's copy.
struct Place {
  uint32_t stride;  // blocks of a row of the whole tensor's copy
  int64_t first;    // the number of this copy's first block there

  // Returns the number of block b of row r.
  DIPTYCH_HD int64_t number(int64_t r, int64_t b) const { return first + r * stride + b; }
};

// `part`: x is a part of a tensor, and rng[4 .. 7] are its row and column there and the whole tensor's extents; else x
// [m, k] is whole.
__device__ __forceinline__ Place place_of(const uint32_t* rng, bool part, int64_t m, int64_t k, bool columnwise) {
  if (!part) return {static_cast<uint32_t>((columnwise ? m : k) / 16), 0};
  const uint32_t outer = rng[columnwise ? 5 : 4], inner = rng[columnwise ? 4 : 5];
  const uint32_t stride = rng[columnwise ? 6 : 7] / 16;
  return {stride, static_cast<int64_t>(outer) * stride + inner / 16};
}

}  // namespace diptych::cuda
