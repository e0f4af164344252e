// permute and permute_columns: moves rows as bytes. Each token's row is read once and written to its destinations.
#include "cpu/permute/permute.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/base/run.h"
#include "diptych/permute.h"
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace diptych::cpu {
namespace {

constexpr int64_t kTaskBytes = 1 << 18;      // bytes that one task writes
constexpr int64_t kStreamedBytes = 8 << 20;  // a larger result does not stay in a cache until it is read
constexpr int64_t kStreamedRow = 256;

// Stores past the caches, which would otherwise read the memory that is about to be overwritten.
void stream(char* to, const char* from, int64_t n) {
#if defined(__x86_64__)
  const int64_t head = std::min<int64_t>(n, -reinterpret_cast<uintptr_t>(to) % 16);
  std::memcpy(to, from, head);
  int64_t i = head;
  for (; i + 64 <= n; i += 64)
    for (int64_t j = i; j < i + 64; j += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + j), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
  std::memcpy(to + i, from + i, n - i);
#else
  std::memcpy(to, from, n);
#endif
}

// Makes streamed stores visible before another thread is told that they are done.
void stream_end() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

struct Rows {
  explicit Rows(const Plane& p)
      : in(p.in.as<const char>()), out(p.out.as<char>()), bytes(plane_row_bytes(p.in)), absent(bytes) {
    for (int64_t i = 0; i < bytes; ++i) absent[i] = static_cast<char>(p.fill >> (i % 4 * 8));
    streamed = bytes >= kStreamedRow && plane_rows(p.out) * bytes >= kStreamedBytes;
  }
  void put(int64_t row, const char* from) const {
    if (streamed) return stream(out + row * bytes, from, bytes);
    if (bytes > 0) std::memcpy(out + row * bytes, from, bytes);
  }

  const char* in;
  char* out;
  int64_t bytes;
  std::vector<char> absent;  // the bytes of an absent row
  bool streamed;
};

// Returns whether probability i, of `size` bytes, is +0 or -0.
bool is_zero(const char* probs, int64_t i, int64_t size) {
  uint64_t bits = 0;
  std::memcpy(&bits, probs + i * size, size);
  return (bits & ~(uint64_t{1} << (size * 8 - 1))) == 0;
}

}  // namespace

Status permute(const PermuteArgs& a, const Execution&) {
  return guarded("permute", [&] {
    const int64_t tokens = a.row_id_map.rows(), slots = a.row_id_map.cols(), rows = a.row_source.numel();
    const auto *map = a.row_id_map.as<const int32_t>(), *row_source = a.row_source.as<const int32_t>();
    const int64_t prob_size = a.probs.given() ? bytes(a.probs.dtype) : 0;
    const char* probs = a.probs.as<const char>();
    char* permuted_probs = a.permuted_probs.as<char>();
    std::vector<Rows> planes;
    int64_t row_bytes = prob_size;
    for (int i = 0; i < a.plane_count; ++i) {
      planes.emplace_back(a.planes[i]);
      row_bytes += planes.back().bytes;
    }
    const bool threaded = rows * row_bytes >= kThreadedElements;
    if (row_bytes == 0) return Status();

    const int64_t token_bytes = std::max<int64_t>(1, tokens > 0 ? rows * row_bytes / tokens : 1) + slots * 4;
    const int64_t step = std::max<int64_t>(1, kTaskBytes / token_bytes);
    for_tasks(slots > 0 ? ceil_div(tokens, step) : 0, threaded, [&](int64_t task) {
      for (int64_t t = task * step, last = std::min(tokens, t + step); t < last; ++t) {
        for (int64_t i = t * slots; i < (t + 1) * slots; ++i) {
          const int64_t row = map[i];
          if (row < 0 || row >= rows) continue;
          const bool padding = a.zero_prob_is_padding && is_zero(probs, i, prob_size);
          for (const Rows& p : planes) p.put(row, padding ? p.absent.data() : p.in + t * p.bytes);
          if (prob_size) std::memcpy(permuted_probs + row * prob_size, probs + i * prob_size, prob_size);
        }
      }
      stream_end();
    });
    const int64_t row_step = std::max<int64_t>(64, kTaskBytes / std::max<int64_t>(1, row_bytes));
    for_tasks(ceil_div(rows, row_step), threaded, [&](int64_t task) {
      for (int64_t r = task * row_step, last = std::min(rows, r + row_step); r < last; ++r) {
        const int64_t entry = row_source[r];  // if the map has another row at this entry, the row is absent
        if (entry >= 0 && entry < tokens * slots && map[entry] == r) continue;
        for (const Rows& p : planes) p.put(r, p.absent.data());
        if (prob_size) std::memset(permuted_probs + r * prob_size, 0, prob_size);
      }
      stream_end();
    });
    return Status();
  });
}

Status permute_columns(const PermuteColumnsArgs& a, const Execution&) {
  return guarded("permute_columns", [&] {
    const int64_t height = a.in.rows(), tokens = a.in.cols(), rows = a.row_source.numel();
    if (height == 0 || rows == 0) return Status();  // the other extent may be huge
    std::vector<int32_t> from(rows);
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t entry = a.row_source.as<const int32_t>()[r];
      from[r] = entry >= 0 && entry / a.slots < tokens ? static_cast<int32_t>(entry / a.slots) : -1;
    }
    for_tasks(height, height * rows >= kThreadedElements, [&](int64_t h) {
      const uint8_t* in = a.in.as<const uint8_t>() + h * tokens;
      uint8_t* out = a.out.as<uint8_t>() + h * rows;
      for (int64_t r = 0; r < rows; ++r) out[r] = from[r] >= 0 ? in[from[r]] : 0;
    });
    return Status();
  });
}

}  // namespace diptych::cpu
