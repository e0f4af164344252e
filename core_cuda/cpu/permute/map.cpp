// permute_map and chunk_map. permute_map is a stable counting sort, chunk by chunk.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/base/run.h"
#include "diptych/permute.h"

namespace diptych::cpu {
namespace {

// Calls put(entry, expert) for each entry of the mask's rows [first, last) that is not 0.
template <typename Put>
void each_mask_entry(const uint8_t* mask, int64_t experts, int64_t first, int64_t last, Put put) {
  for (int64_t t = first; t < last; ++t) {
    const uint8_t* line = mask + t * experts;
    for (int64_t e = 0; e < experts; e += 8) {
      uint64_t eight = 0;  // eight entries at a time, most of which are all 0
      const int64_t n = std::min<int64_t>(8, experts - e);
      std::memcpy(&eight, line + e, n);
      if (eight == 0) continue;
      for (int64_t i = 0; i < n; ++i)
        if (line[e + i] != 0) put(t * experts + e + i, e + i);
    }
  }
}

template <typename Id, typename Put>
void each_id(const Id* ids, int64_t experts, int64_t first, int64_t last, Put put) {
  for (int64_t i = first; i < last; ++i)
    if (ids[i] >= 0 && ids[i] < experts) put(i, static_cast<int64_t>(ids[i]));
}

template <typename Put>
void each_entry(const PermuteMapArgs& a, int64_t experts, int64_t first, int64_t last, Put put) {
  if (a.kind == RoutingMap::mask) {
    each_mask_entry(a.routing.as<const uint8_t>(), experts, first, last, put);
  } else if (a.routing.dtype == DType::i32) {
    each_id(a.routing.as<const int32_t>(), experts, first, last, put);
  } else {
    each_id(a.routing.as<const int64_t>(), experts, first, last, put);
  }
}

int64_t round_up(int64_t n, int64_t align) { return ceil_div(n, align) * align; }

}  // namespace

Status permute_map(const PermuteMapArgs& a, const Execution&) {
  return guarded("permute_map", [&] {
    const int64_t experts = a.tokens_per_expert.numel(), rows = a.row_source.numel(), entries = a.routing.numel();
    const bool mask = a.kind == RoutingMap::mask;
    const int64_t items = mask ? a.routing.rows() : entries;
    constexpr int64_t kChunk = 1 << 12;
    const int64_t chunks = ceil_div(items, kChunk);
    const bool threaded = entries >= kThreadedElements;
    // For each chunk and expert: first the number of rows, later the chunk's next row in the expert's region.
    std::vector<int32_t> next(chunks * experts);
    for_tasks(chunks, threaded, [&](int64_t c) {
      int32_t* count = &next[c * experts];
      each_entry(a, experts, c * kChunk, std::min(items, (c + 1) * kChunk), [&](int64_t, int64_t e) { ++count[e]; });
    });

    int64_t end = 0;
    auto* offsets = a.expert_offsets.as<int32_t>();
    for (int64_t e = 0; e < experts; ++e) {
      int64_t at = end;
      for (int64_t c = 0; c < chunks; ++c) {
        const int32_t count = next[c * experts + e];
        next[c * experts + e] = static_cast<int32_t>(at);
        at += count;
      }
      a.tokens_per_expert.as<int32_t>()[e] = static_cast<int32_t>(std::clamp<int64_t>(rows - end, 0, at - end));
      offsets[e] = static_cast<int32_t>(std::min(end, rows));
      end += round_up(at - end, a.align);
    }
    offsets[experts] = static_cast<int32_t>(std::min(end, rows));

    auto *map = a.row_id_map.as<int32_t>(), *row_source = a.row_source.as<int32_t>();
    if (rows > 0) std::memset(row_source, 0xFF, rows * sizeof(int32_t));
    for_tasks(chunks, threaded, [&](int64_t c) {
      const int64_t first = c * kChunk, last = std::min(items, first + kChunk), width = mask ? experts : 1;
      if (width > 0) std::memset(map + first * width, 0xFF, (last - first) * width * sizeof(int32_t));
      int32_t* to = &next[c * experts];
      each_entry(a, experts, first, last, [&](int64_t entry, int64_t e) {
        const int32_t row = to[e]++;
        if (row >= rows) return;
        map[entry] = row;
        row_source[row] = static_cast<int32_t>(entry);
      });
    });
    return Status();
  });
}

Status chunk_map(const ChunkMapArgs& a, const Execution&) {
  return guarded("chunk_map", [&] {
    const int64_t chunks = a.split_sizes.numel(), tokens = a.row_id_map.rows();
    const auto *sizes = a.split_sizes.as<const int32_t>(), *order = a.order.as<const int32_t>();
    auto *map = a.row_id_map.as<int32_t>(), *row_source = a.row_source.as<int32_t>();
    std::fill_n(map, tokens, -1);
    std::fill_n(row_source, tokens, -1);
    std::vector<int64_t> start(chunks + 1);
    for (int64_t c = 0; c < chunks; ++c) start[c + 1] = std::min(tokens, start[c] + std::max(0, sizes[c]));
    std::vector<bool> named(chunks);
    int64_t row = 0;
    for (int64_t j = 0; j < chunks; ++j) {
      const int64_t c = order[j];
      if (c < 0 || c >= chunks || named[c]) continue;
      named[c] = true;
      for (int64_t t = start[c]; t < start[c + 1]; ++t, ++row) {
        map[t] = static_cast<int32_t>(row);
        row_source[row] = static_cast<int32_t>(t);
      }
    }
    return Status();
  });
}

}  // namespace diptych::cpu
