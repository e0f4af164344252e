// statistics: the order of all sums is fixed, so parts run on any thread.
#include "cpu/statistics/statistics.h"

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/base/run.h"
#include "cpu/quantize/codec.h"

namespace diptych::cpu {
namespace {

constexpr int64_t kTile = int64_t{kSumLanes} * kLeastRows;

// The values of all codes of an element of one byte.
template <typename Decode>
std::array<float, 256> decoded(Decode decode) {
  std::array<float, 256> values;
  for (int32_t code = 0; code < 256; ++code) values[static_cast<size_t>(code)] = decode(code);
  return values;
}
const float* byte_values(Number number) {
  static const auto e4m3 = decoded([](int32_t code) { return decode<E4M3, float>(code); });
  static const auto e5m2 = decoded([](int32_t code) { return decode<E5M2, float>(code); });
  static const auto e8m0 = decoded([](int32_t code) {
    return bits_as<float>(code == 0 ? 1 << 22 : code == 255 ? kInfBits + 1 : code << 23);
  });
  static const auto i8 = decoded([](int32_t code) { return static_cast<float>(static_cast<int8_t>(code)); });
  static const auto u8 = decoded([](int32_t code) { return static_cast<float>(code); });
  return (number == Number::e4m3   ? e4m3
          : number == Number::e5m2 ? e5m2
          : number == Number::e8m0 ? e8m0
          : number == Number::i8   ? i8
                                   : u8)
      .data();
}

template <typename T>
void converted(const void* x, int64_t n, float* out) {
  const T* values = static_cast<const T*>(x);
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(values[i]);
}

// Writes n elements as float32, which represents them exactly.
void load_floats(Number number, const void* x, int64_t n, float* out) {
  switch (number) {
    case Number::f32:
      std::memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
      return;
    case Number::f16:
      return kernels().load(DType::f16, x, n, out);
    case Number::bf16:
      return kernels().load(DType::bf16, x, n, out);
    case Number::i16:
      return converted<int16_t>(x, n, out);
    case Number::u16:
      return converted<uint16_t>(x, n, out);
    default:
      const float* values = byte_values(number);
      for (int64_t i = 0; i < n; ++i) out[i] = values[static_cast<const uint8_t*>(x)[i]];
  }
}

double folded(double* v, int n) {
  for (int half = n / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}

// What the elements were rounded to, from the part's first one on; null: nothing.
struct Rounded {
  const float *result, *largest;
  float beyond;
};

// Replaces n elements by their errors, and counts the clipped and flushed ones.
void subtract(const Rounded& to, int64_t n, float* x, Moments* counts) {
  const float *results = to.result, *most = to.largest;
  int32_t clipped = 0, flushed = 0;  // n is at most kTile
  for (int64_t i = 0; i < n; ++i) {
    const float result = results[i], largest = most[i], magnitude = std::fabs(x[i]);
    clipped += (std::fabs(result) == largest) & (magnitude > largest * to.beyond);
    flushed += (magnitude != 0) & (result == 0);
    x[i] = magnitude < INFINITY ? result - x[i] : NAN;
  }
  counts->clipped += clipped, counts->flushed += flushed;
}

// The part of n elements at x.
Moments narrow_part(Number number, const char* x, int64_t n, const Rounded& to) {
  const Kernels& simd = kernels();
  LaneMoments m = {};
  Moments found = {};
  alignas(64) float tile[kTile];
  for (int64_t i = 0; i < n; i += kTile) {
    const int64_t count = std::min(kTile, n - i), rows = ceil_div(count, kSumLanes);
    const char* at = x + i * row(number).bytes;
    if (number == Number::f32 && count == kTile && to.result == nullptr) {
      simd.statistics(reinterpret_cast<const float*>(at), rows, smallest_normal(number), &m);
      continue;
    }
    load_floats(number, at, count, tile);
    if (to.result != nullptr) subtract({to.result + i, to.largest + i, to.beyond}, count, tile, &found);
    std::fill(tile + count, tile + rows * kSumLanes, 0.0f);  // no elements, but 0 is added to sums
    simd.statistics(tile, rows, smallest_normal(to.result != nullptr ? Number::f32 : number), &m);
    m.zero -= rows * kSumLanes - count;
  }
  found.sum = folded(m.sum, kSumLanes), found.squares = folded(m.squares, kSumLanes);
  found.largest = bits_as<float>(m.largest);
  found.zero = m.zero, found.nan = m.nan, found.infinite = m.infinite, found.subnormal = m.subnormal;
  return found;
}

double largest_finite(const double* x, int64_t n) {
  double largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double magnitude = std::fabs(x[i]);
    largest = magnitude <= __DBL_MAX__ && magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// The same for elements that need float64. Values are multiplied by `scale` before they are added.
template <typename T>
Moments wide_part(const T* x, int64_t n, double scale) {
  double sum[kSumLanes] = {}, squares[kSumLanes] = {}, largest = 0;
  Moments m = {};
  for (int64_t i = 0; i < n; i += kSumLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kSumLanes, n - i));
    for (int l = 0; l < lanes; ++l) {
      const double value = static_cast<double>(x[i + l]), magnitude = std::fabs(value);
      m.zero += magnitude == 0;
      m.nan += magnitude != magnitude;
      m.infinite += magnitude > __DBL_MAX__;
      m.subnormal += std::is_floating_point_v<T> && magnitude > 0 && magnitude < __DBL_MIN__;
      const bool finite = magnitude <= __DBL_MAX__;
      largest = finite && magnitude > largest ? magnitude : largest;
      const double v = finite ? value * scale : 0.0;
      sum[l] += v, squares[l] += v * v;
    }
  }
  m.sum = folded(sum, kSumLanes), m.squares = folded(squares, kSumLanes), m.largest = largest;
  return m;
}

Moments part(Number number, const char* x, int64_t n, double scale, const Rounded& to) {
  const auto wide = [&]<typename T>(T) { return wide_part(reinterpret_cast<const T*>(x), n, scale); };
  switch (number) {
    case Number::f64:
      return wide(double{});
    case Number::i64:
      return wide(int64_t{});
    case Number::u64:
      return wide(uint64_t{});
    case Number::i32:
      return wide(int32_t{});
    case Number::u32:
      return wide(uint32_t{});
    default:
      return narrow_part(number, x, n, to);
  }
}

}  // namespace

Status statistics(const StatisticsArgs& a, const Execution&) {
  return guarded("statistics", [&] {
    const int64_t width = row(a.number).bytes, n = a.x.numel() * bytes(a.x.dtype) / width;
    const int64_t parts = part_count(n), length = kSumLanes * rows_of_part(n);
    const bool threaded = n * width >= 4 * kThreadedElements;
    const char* x = a.x.as<const char>();
    std::vector<Moments> found(kMostParts);
    const auto each = [&](const auto& body) {
      for_tasks(parts, threaded, [&](int64_t p) {
        body(x + p * length * width, std::min(length, n - p * length), found[static_cast<size_t>(p)]);
      });
    };
    // float64 values are divided by a power of two near their largest magnitude, so that no square overflows.
    int exponent = 0;
    if (a.number == Number::f64) {
      each([](const char* at, int64_t count, Moments& m) {
        m.largest = largest_finite(reinterpret_cast<const double*>(at), count);
      });
      double largest = 0;
      for (const Moments& m : found) largest = std::max(largest, m.largest);
      if (largest > 0) exponent = std::clamp(std::ilogb(largest), -1022, 1022);
    }
    const bool rounded = a.result.given();
    const double scale = std::ldexp(1.0, -exponent);
    each([&](const char* at, int64_t count, Moments& m) {
      const int64_t first = (at - x) / width;
      const Rounded to = rounded ? Rounded{a.result.as<float>() + first, a.largest.as<float>() + first, a.beyond}
                                 : Rounded{nullptr, nullptr, 0};
      m = part(a.number, at, count, scale, to);
    });
    double sum[kMostParts], squares[kMostParts];
    Moments all = {};
    for (int p = 0; p < kMostParts; ++p) {
      const Moments& m = found[static_cast<size_t>(p)];
      sum[p] = m.sum, squares[p] = m.squares;
      all.largest = std::max(all.largest, m.largest);
      all.zero += m.zero, all.nan += m.nan, all.infinite += m.infinite, all.subnormal += m.subnormal;
      all.clipped += m.clipped, all.flushed += m.flushed;
    }
    const int64_t finite = n - all.nan - all.infinite;
    const double count = static_cast<double>(std::max<int64_t>(finite, 1)), unit = std::ldexp(1.0, exponent);
    const double mean = std::clamp(folded(sum, kMostParts) / count * unit, -all.largest, all.largest);
    const double rms = std::min(std::sqrt(folded(squares, kMostParts) / count) * unit, all.largest);
    const double averages[] = {all.largest, mean, rms};
    const int64_t counts[] = {all.zero, all.nan, all.infinite, all.subnormal, all.clipped, all.flushed};
    double out[9];
    std::copy_n(averages, 3, out);
    std::transform(counts, counts + 6, out + 3, [](int64_t n) { return static_cast<double>(n); });
    std::memcpy(a.out.data, out, (rounded ? 9 : 7) * sizeof(double));
    return Status();
  });
}

}  // namespace diptych::cpu
