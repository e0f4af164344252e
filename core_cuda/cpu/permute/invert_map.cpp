// invert_map: finds for each row the last entry of the map that holds it.
#include <algorithm>
#include <atomic>

#include "cpu/base/run.h"
#include "diptych/permute.h"

namespace diptych::cpu {

Status invert_map(const InvertMapArgs& a, const Execution&) {
  return guarded("invert_map", [&] {
    const int64_t entries = a.row_id_map.numel(), rows = a.row_source.numel();
    const auto* map = a.row_id_map.as<const int32_t>();
    auto *row_source = a.row_source.as<int32_t>(), *kept = a.kept.as<int32_t>();
    constexpr int64_t kChunk = 1 << 14;
    const int64_t chunks = ceil_div(entries, kChunk);
    const bool threaded = entries >= kThreadedElements;
    const auto exists = [&](int32_t row) { return row >= 0 && row < rows; };
    std::fill_n(row_source, rows, -1);
    for_tasks(chunks, threaded, [&](int64_t c) {
      for (int64_t i = c * kChunk, last = std::min(entries, i + kChunk); i < last; ++i) {
        if (!exists(map[i])) continue;
        const std::atomic_ref<int32_t> at(row_source[map[i]]);
        int32_t found = at.load(std::memory_order_relaxed);
        while (found < i && !at.compare_exchange_weak(found, static_cast<int32_t>(i), std::memory_order_relaxed)) {
        }
      }
    });
    if (kept == nullptr) return Status();
    for_tasks(chunks, threaded, [&](int64_t c) {
      for (int64_t i = c * kChunk, last = std::min(entries, i + kChunk); i < last; ++i)
        kept[i] = exists(map[i]) && row_source[map[i]] == i ? map[i] : -1;
    });
    return Status();
  });
}

}  // namespace diptych::cpu
