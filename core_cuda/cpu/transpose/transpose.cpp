// transpose: blocks of 8 x 8 bytes in registers, in bands of the result's rows.
#include "diptych/transpose.h"

#include <cstring>

#include "cpu/base/run.h"

namespace diptych::cpu {
namespace {

constexpr int64_t kSide = 8;
constexpr int64_t kBand = 64;  // rows of the result that a task writes: the cache lines that it reads are used whole

// Exchanges the bits of x that `mask` selects for those `shift` higher of y.
void exchange(uint64_t& x, uint64_t& y, uint64_t mask, int shift) {
  const uint64_t t = (y ^ x >> shift) & mask;
  y ^= t, x ^= t << shift;
}

// Transposes bytes [8][8] in place, a row in each word, the first byte lowest.
void transpose8x8(uint64_t (&w)[kSide]) {
  for (int i = 0; i < 4; ++i) exchange(w[i], w[i + 4], 0x00000000ffffffff, 32);
  for (int i : {0, 1, 4, 5}) exchange(w[i], w[i + 2], 0x0000ffff0000ffff, 16);
  for (int i : {0, 2, 4, 6}) exchange(w[i], w[i + 1], 0x00ff00ff00ff00ff, 8);
}

}  // namespace

Status transpose(const TransposeArgs& a, const Execution&) {
  return guarded("transpose", [&] {
    const int64_t rows = a.in.shape[a.in.rank - 2], cols = a.in.cols();
    if (a.in.numel() == 0) return Status();  // another extent may be huge
    const int64_t bands = ceil_div(cols, kBand);
    for_tasks(a.in.numel() / (rows * cols) * bands, a.in.numel() >= kThreadedElements, [&](int64_t task) {
      const uint8_t* in = a.in.as<const uint8_t>() + task / bands * rows * cols;
      uint8_t* out = a.out.as<uint8_t>() + task / bands * rows * cols;
      const int64_t first = task % bands * kBand, last = std::min(cols, first + kBand);
      for (int64_t r = 0; r < rows; r += kSide) {
        const int64_t height = std::min(kSide, rows - r);
        for (int64_t c = first; c < last; c += kSide) {
          const int64_t width = std::min(kSide, last - c);
          uint64_t w[kSide] = {};
          for (int64_t i = 0; i < height; ++i) std::memcpy(&w[i], in + (r + i) * cols + c, width);
          transpose8x8(w);
          for (int64_t i = 0; i < width; ++i) std::memcpy(out + (c + i) * rows + r, &w[i], height);
        }
      }
    });
    return Status();
  });
}

}  // namespace diptych::cpu
