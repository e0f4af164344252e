// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and how stochastic rounding
// draws from it.
#pragma once

#include "cuda/base/codec.cuh"

namespace diptych::cuda {

struct Words4 {
  uint32_t w[4];
};

DIPTYCH_HD Words4 philox(uint64_t key, uint64_t counter_lo, uint64_t counter_hi) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  uint32_t c0 = static_cast<uint32_t>(counter_lo), c1 = static_cast<uint32_t>(counter_lo >> 32);
  uint32_t c2 = static_cast<uint32_t>(counter_hi), c3 = static_cast<uint32_t>(counter_hi >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c0, b = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0, c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1, c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Random bytes of stochastic rounding (NUMERICS 5): block b holds elements 16 b .. 16 b + 15 of the copy that is
// written. `rng` holds the low and high words of seed and offset; the columnwise copy draws at the next offset.
DIPTYCH_HD Words4 rounding_bytes(const uint32_t* rng, bool columnwise, uint64_t b) {
  const uint64_t seed = rng[0] | static_cast<uint64_t>(rng[1]) << 32;
  const uint64_t offset = (rng[2] | static_cast<uint64_t>(rng[3]) << 32) + (columnwise ? 1 : 0);
  return philox(seed, b, offset);
}

}  // namespace diptych::cuda
