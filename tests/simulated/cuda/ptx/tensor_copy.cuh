// Stands in for cuda/ptx/tensor_copy.cuh: rows of 128 bytes of a tensor of bytes, with the 128-byte swizzle.
#pragma once

#include <cuda.h>

#include "cuda/ptx/barrier.cuh"

namespace simulated {

// What a tensor map holds here.
struct Map {
  unsigned char* base;
  int64_t extents[3];
  int box[3];
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

inline Map map_of(const CUtensorMap* opaque) {
  Map m;
  std::memcpy(&m, opaque, sizeof(m));
  return m;
}

inline void move_box(const Map& m, Block* block, uint32_t at, int x, int y, int z, bool store) {
  if (m.box[0] != 128 || m.box[2] != 1 || at % 1024 != 0) fail("a box with another swizzle than the products'");
  if (x % 16 != 0) fail("a box that begins between 16 bytes");
  for (int row = 0; row < m.box[1]; ++row) {
    for (int i = 0; i < 128; ++i) {
      unsigned char* shared = memory(block, at + row * 128 + ((i / 16) ^ (row % 8)) * 16 + i % 16);
      const int64_t at_x = x + i, at_y = y + row;
      const bool inside =
          at_x >= 0 && at_x < m.extents[0] && at_y >= 0 && at_y < m.extents[1] && z >= 0 && z < m.extents[2];
      unsigned char* global = m.base + ((z * m.extents[1] + at_y) * m.extents[0] + at_x);
      if (!store) {
        *shared = inside ? *global : 0;
      } else if (inside) {
        *global = *shared;
      }
    }
  }
}

}  // namespace simulated

namespace diptych::cuda::ptx {

inline void prefetch(const CUtensorMap*) {}

inline void copy_box_to(uint32_t ranks, void* shared, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z) {
  const simulated::Map m = simulated::map_of(map);
  const uint32_t to = simulated::address(shared), counted = simulated::address(barrier);
  for (auto& b : simulated::blocks) {
    if (!(ranks >> b->rank & 1)) continue;
    simulated::engine.push_back([=, block = b.get()] {
      simulated::move_box(m, block, to, x, y, z, false);
      simulated::count_bytes(simulated::barrier(block, counted), m.box[0] * m.box[1]);
    });
  }
}
inline void copy_box_to(uint32_t ranks, void* shared, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
  copy_box_to(ranks, shared, map, barrier, x, y, 0);
}
inline void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z) {
  copy_box_to(1u << simulated::self->block->rank, shared, map, barrier, x, y, z);
}
inline void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
  copy_box(shared, map, barrier, x, y, 0);
}
inline void store_box(const CUtensorMap* map, const void* shared, int x, int y, int z) {
  simulated::self->open_stores.push_back([m = simulated::map_of(map), block = simulated::self->block,
                                          from = simulated::address(shared), x, y,
                                          z] { simulated::move_box(m, block, from, x, y, z, true); });
}

}  // namespace diptych::cuda::ptx
