// Square blocks made from the payload and scales of their rows (NUMERICS 3, "Columnwise copies made from rows").
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "cpu/isa/isa.h"
#include "diptych/format.h"

namespace diptych::cpu {

// FP8 numbers times 2^-d, each product rounded once to the nearest even, for d = 0, 1, ..., kLast and more.
class Shifts {
 public:
  static constexpr int kLast = 34;  // 57344 * 2^-34 is less than half of E5M2's smallest number, 2^-16

  // `element`: DType::e4m3 or DType::e5m2.
  explicit constexpr Shifts(DType element) {
    const int steps = element == DType::e4m3 ? 8 : 4, nan = element == DType::e4m3 ? 0x7F : 0x7C;
    for (int d = 0; d <= kLast; ++d) {
      ByteShift& s = each_[d];
      s.down = static_cast<uint8_t>(std::min(steps * d, 0x80));
      s.normal = static_cast<uint8_t>(std::min(steps * (d + 1), 0x80));
      s.nan = static_cast<uint8_t>(nan);
      for (int k = 1; k <= 8; ++k) {
        int byte = 0;
        while (byte < nan && !reaches(byte, steps, d, k)) ++byte;
        s.reaches[k - 1] = static_cast<uint8_t>(k <= steps && byte < nan ? byte : 0x80);
      }
    }
  }

  // The shift of a ratio of scales, a power of two from 2^-254 to 1, or 0 where float32 does not hold it.
  const ByteShift& of(float ratio) const {
    return each_[ratio == 0 ? kLast : std::clamp(-std::ilogb(ratio), 0, kLast)];
  }

 private:
  // Whether the number of a byte, times 2^-d, rounds to k or more times the smallest number.
  static constexpr bool reaches(int byte, int steps, int d, int k) {
    const int64_t number = byte < steps ? byte : static_cast<int64_t>(steps + byte % steps) << (byte / steps - 1);
    const int64_t middle = static_cast<int64_t>(2 * k - 1) << d;  // of k - 1 and k, in units of half of 2^-d
    return k % 2 == 0 ? 2 * number >= middle : 2 * number > middle;
  }

  std::array<ByteShift, kLast + 1> each_{};
};

inline constexpr Shifts kShiftsE4M3(DType::e4m3), kShiftsE5M2(DType::e5m2);

// Brings the rows of one block to one scale, which it returns. Element (r, c) is at payload[r * ld + c], the scale of
// row r at inv[r * step].
inline float join_rows(const Kernels& simd, DType element, uint8_t* payload, int64_t ld, int64_t rows, int64_t cols,
                       const float* inv, int64_t step) {
  const Shifts& shifts = element == DType::e4m3 ? kShiftsE4M3 : kShiftsE5M2;
  const uint8_t nan = shifts.of(1).nan;
  const auto counts = [nan](uint8_t byte) { return (byte & 0x7F) != 0 && (byte & 0x7F) < nan; };
  float counted = 0, any = 0;  // scales are positive
  for (int64_t r = 0; r < rows; ++r) {
    const float scale = inv[r * step];
    const uint8_t* row = payload + r * ld;
    any = std::max(any, scale);
    if (scale > counted && std::any_of(row, row + cols, counts)) counted = scale;
  }
  const float top = counted > 0 ? counted : any;
  for (int64_t r = 0; r < rows; ++r)  // a row that does not count may have a larger scale; it stays as it is
    if (inv[r * step] < top) simd.shift_bytes(shifts.of(inv[r * step] / top), cols, payload + r * ld);
  return top;
}

}  // namespace diptych::cpu
