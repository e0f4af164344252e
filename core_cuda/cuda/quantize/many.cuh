// Kernels over many tensors: a table among the kernel's arguments says which tensor a thread block belongs to.
#pragma once

#include <algorithm>
#include <span>

#include "cuda/base/launch.cuh"
#include "diptych/many.h"

namespace diptych::cuda {

constexpr int kTableBytes = 4000;  // of the 4096 that every device takes as arguments of a kernel

// What a kernel needs of each tensor, and the first of its thread blocks.
template <typename Item>
struct Table {
  static constexpr int kMost = (kTableBytes - 2 * int{sizeof(unsigned)}) / int{sizeof(Item) + sizeof(unsigned)};
  int count = 0;
  unsigned first[kMost + 1] = {};
  Item of[kMost] = {};
};

// Returns the tensor that a thread block belongs to.
template <typename Item>
__device__ __forceinline__ int tensor_of(const Table<Item>& t, unsigned block) {
  int low = 0, high = t.count;  // the tensor lies in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (block < t.first[middle]) {
      high = middle;
    } else {
      low = middle;
    }
  }
  return low;
}

// Launches a kernel over the tensors of `calls`, in as few tables as hold them. `describe` returns the item of a call,
// `blocks` the number of thread blocks of an item.
template <typename Item, typename... Shared, typename Describe, typename Blocks>
Status launch_many(const char* name, void (*kernel)(Table<Item>, Shared...), std::span<const QuantizeArgs> calls,
                   int threads, const Execution& exec, Describe&& describe, Blocks&& blocks,
                   std::type_identity_t<Shared>... shared) {
  for (size_t begin = 0; begin < calls.size(); begin += Table<Item>::kMost) {
    Table<Item> table;
    int64_t total = 0;
    for (const QuantizeArgs& one : calls.subspan(begin, std::min<size_t>(Table<Item>::kMost, calls.size() - begin))) {
      Item& item = table.of[table.count++];
      item = describe(one);
      total += blocks(item);
      table.first[table.count] = static_cast<unsigned>(total);  // launch refuses more than fit
    }
    DIPTYCH_TRY(launch(name, kernel, total, threads, 0, exec.stream, table, shared...));
  }
  return {};
}

Status tile_many(std::span<const QuantizeArgs>, const Execution&);   // float32 scales
Status mxfp8_many(std::span<const QuantizeArgs>, const Execution&);  // E8M0 scales
Status amax_many(std::span<const QuantizeArgs>, const Execution&);   // writes each call's amax
Status clear_amaxes(std::span<const QuantizeArgs>, const Execution&);

}  // namespace diptych::cuda
