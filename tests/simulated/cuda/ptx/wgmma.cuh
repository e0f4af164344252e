// Stands in for cuda/ptx/wgmma.cuh, with its matrices' descriptors. Products are made when they are waited for, each
// thread its own elements; sums of one instruction are exact and then rounded to float32.
#pragma once

#include "cuda/base/codec.cuh"
#include "cuda/ptx/barrier.cuh"

namespace diptych::cuda::ptx {

enum class Element { e4m3, e5m2, bf16 };

inline uint32_t matrix_address(const void* shared) { return shared_address(shared) / 16; }
inline uint64_t matrix(uint32_t at) {
  return uint64_t{1024 / 16} << 32 | at;
}  // address, and from eight rows to the next
inline uint64_t repeated_matrix(uint32_t at) { return at; }

inline void products_begin() { __syncwarp(); }
inline void products_commit() {
  __syncwarp();
  simulated::self->products.push_back(std::move(simulated::self->open_products));
  simulated::self->open_products.clear();
}
template <int kPending>
void products_wait() {
  __syncwarp();
  for (int i = simulated::chance() % 3; i > 0; --i) simulated::leave();
  auto& products = simulated::self->products;
  while (products.size() > kPending) {
    for (auto& product : products.front()) product();
    products.pop_front();
  }
  __syncwarp();
}
template <int kSums>
void products_touch(float (&)[kSums]) {}

// 32 bytes of k of a row; returns how many k they are.
template <Element kElement>
int read_row(float (&to)[32], simulated::Block* block, uint64_t matrix, int row) {
  const uint32_t start = static_cast<uint32_t>(matrix) * 16, eight_rows = static_cast<uint32_t>(matrix >> 32) * 16;
  const uint32_t first = start + row / 8 * eight_rows + row % 8 * 128;
  for (uint32_t at = first; at < first + 32; at += 16) {
    const unsigned char* bytes = simulated::memory(block, at ^ (at >> 3 & 0x70));
    if constexpr (kElement == Element::bf16) {
      for (int k = 0; k < 8; ++k) {
        to[(at - first) / 2 + k] = float_of(static_cast<uint32_t>(bytes[2 * k] | bytes[2 * k + 1] << 8) << 16);
      }
    } else {
      for (int k = 0; k < 16; ++k) to[at - first + k] = decode2<kElement == Element::e5m2>(bytes[k]).x;
    }
  }
  return kElement == Element::bf16 ? 16 : 32;
}

template <Element kA, Element kB, int kSums>
void product(float* d, uint64_t a, uint64_t b, bool add) {
  simulated::self->open_products.push_back([d, a, b, add, t = simulated::self] {
    const int first = t->index % 128 / 32 * 16 + t->index % 32 / 4, q = t->index % 4 * 2;
    float rows[2][32], column[32];
    for (int half = 0; half < 2; ++half) read_row<kA>(rows[half], t->block, a, first + half * 8);
    for (int i = 0; i < kSums / 2; ++i) {
      const int count = read_row<kB>(column, t->block, b, i / 2 * 8 + q + i % 2);
      for (int half = 0; half < 2; ++half) {
        float& sum = d[i / 2 * 4 + half * 2 + i % 2];
        double exact = add ? sum : 0.0;
        for (int k = 0; k < count; ++k) exact += static_cast<double>(rows[half][k]) * column[k];
        sum = static_cast<float>(exact);
      }
    }
  });
}

}  // namespace diptych::cuda::ptx
