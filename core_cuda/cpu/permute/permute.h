// The destinations of one token, for permute's kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace diptych::cpu {

struct Destination {
  int32_t row, slot;
};

// Lists the rows of a token's slots in ascending order.
inline void destinations(const int32_t* map, int64_t slots, int64_t rows, std::vector<Destination>& out) {
  out.clear();
  for (int64_t s = 0; s < slots; ++s)
    if (map[s] >= 0 && map[s] < rows) out.push_back({map[s], static_cast<int32_t>(s)});
  const auto before = [](const Destination& a, const Destination& b) { return a.row < b.row; };
  if (!std::is_sorted(out.begin(), out.end(), before)) std::stable_sort(out.begin(), out.end(), before);
}

}  // namespace diptych::cpu
