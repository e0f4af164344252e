// Statistics of a tensor's elements (NUMERICS 11).
#pragma once

#include <algorithm>

#include "diptych/format.h"
#include "diptych/op.h"

namespace diptych {

// What the elements are, numbered as the frontends pass it. A bool is a u8 of 0 or 1.
enum class Number : int32_t { f64, f32, f16, bf16, e4m3, e5m2, e8m0, i64, i32, i16, i8, u64, u32, u16, u8, count_ };

struct NumberRow {
  Number id;
  const char* name;  // as torch, jax and ml_dtypes spell it
  int32_t bytes;
  int32_t min_exponent;  // 2^min_exponent is the smallest normal magnitude; kNoSubnormals: there are no others
};
inline constexpr int32_t kNoSubnormals = -9999;

// clang-format off
inline constexpr NumberRow kNumbers[] = {
    {Number::f64,  "float64",        8, -1022},
    {Number::f32,  "float32",        4, -126},
    {Number::f16,  "float16",        2, -14},
    {Number::bf16, "bfloat16",       2, -126},
    {Number::e4m3, "float8_e4m3fn",  1, -6},
    {Number::e5m2, "float8_e5m2",    1, -14},
    {Number::e8m0, "float8_e8m0fnu", 1, kNoSubnormals},
    {Number::i64,  "int64",          8, kNoSubnormals},
    {Number::i32,  "int32",          4, kNoSubnormals},
    {Number::i16,  "int16",          2, kNoSubnormals},
    {Number::i8,   "int8",           1, kNoSubnormals},
    {Number::u64,  "uint64",         8, kNoSubnormals},
    {Number::u32,  "uint32",         4, kNoSubnormals},
    {Number::u16,  "uint16",         2, kNoSubnormals},
    {Number::u8,   "uint8",          1, kNoSubnormals},
};
// clang-format on
static_assert(sizeof(kNumbers) / sizeof(kNumbers[0]) == static_cast<int>(Number::count_));

constexpr bool valid(Number n) { return n >= Number::f64 && n < Number::count_; }
constexpr const NumberRow& row(Number n) { return kNumbers[static_cast<int>(n)]; }
// The bits of the smallest normal magnitude as float32; 0 where float32 has it not, or nothing is subnormal.
constexpr int32_t smallest_normal(Number n) {
  return row(n).min_exponent < -126 ? 0 : (row(n).min_exponent + 127) << 23;
}

// How sums are ordered: elements fill rows of kSumLanes, rows fill parts.
inline constexpr int kSumLanes = 256, kLeastRows = 16, kMostParts = 512;
constexpr int64_t rows_of_part(int64_t n) {
  return std::max<int64_t>(kLeastRows, ceil_div(n, int64_t{kSumLanes} * kMostParts));
}
constexpr int64_t part_count(int64_t n) { return ceil_div(n, kSumLanes * rows_of_part(n)); }

// What is known of a part, and of the whole tensor.
struct Moments {
  double sum, squares, largest;
  int64_t zero, nan, infinite, subnormal, clipped, flushed;
};

// With `result`, which x was rounded to, the statistics are those of the errors: result - x in float32, and NaN where x
// is not finite. Two more counts are of the elements that were clipped, |result| = largest and |x| > largest * beyond,
// and of those that were flushed, x != 0 and result = 0.
struct StatisticsArgs {
  TensorView x;          // of any shape, read as bytes
  TensorView result;     // [n] float32, optional: with x of float32, bfloat16 or float16 alone
  TensorView largest;    // [n] float32, with result: the largest magnitude that each element can be rounded to
  TensorView out;        // [14] int32, aligned to 8 bytes: seven float64; with result [18]: nine
  TensorView workspace;  // uint8, at least kStatisticsWorkspace bytes, 16-byte aligned; CUDA only
  Number number;
  float beyond = 1.0f;
};
inline constexpr int64_t kStatisticsWorkspace = kMostParts * sizeof(Moments);

// Calls f with each tensor of the arguments and its role.
template <typename F>
void fields(StatisticsArgs& a, F&& f) {
  f(a.x), f(a.result), f(a.largest), f(a.out, Role::output), f(a.workspace, Role::workspace);
}

DIPTYCH_OP(statistics, StatisticsArgs)

}  // namespace diptych
