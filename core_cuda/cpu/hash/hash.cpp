// hash: parts of whole blocks, whose sums are added in any order.
#include "cpu/hash/hash.h"

#include <atomic>
#include <cstring>

#include "cpu/base/run.h"
#include "diptych/hash.h"

namespace diptych::cpu {

Status hash(const HashArgs& a, const Execution&) {
  return guarded("hash", [&] {
    constexpr int64_t kPart = 128;  // blocks of a task
    // One thread reads almost as fast as memory is. More of them wait for cores on which a framework's threads spin.
    constexpr int64_t kThreaded = 8 << 20;
    const Kernels& simd = kernels();
    const uint8_t* x = a.x.as<const uint8_t>();
    const int64_t bytes = a.x.numel() * diptych::bytes(a.x.dtype), blocks = ceil_div(bytes, kHashBlock);
    std::atomic<uint64_t> sums[2] = {};
    for_tasks(ceil_div(blocks, kPart), bytes >= kThreaded, [&](int64_t task) {
      const int64_t first = task * kPart, end = std::min(blocks, first + kPart), whole = bytes / kHashBlock;
      uint64_t part[2] = {};
      simd.hash(x + first * kHashBlock, first, std::min(end, whole) - first, part);
      if (end > whole) {
        alignas(64) uint8_t last[kHashBlock] = {};
        std::memcpy(last, x + whole * kHashBlock, bytes % kHashBlock);
        simd.hash(last, whole, 1, part);
      }
      for (int lane = 0; lane < 2; ++lane) sums[lane].fetch_add(part[lane], std::memory_order_relaxed);
    });
    uint64_t state[2] = {sums[0] + static_cast<uint64_t>(bytes), sums[1] + kGolden};
    state[0] += state[1], state[1] += state[0];
    state[0] = mix(state[0]), state[1] = mix(state[1]);
    state[0] += state[1], state[1] += state[0];
    std::memcpy(a.out.data, state, sizeof(state));  // x86-64 and Arm: little-endian
    return Status();
  });
}

}  // namespace diptych::cpu
