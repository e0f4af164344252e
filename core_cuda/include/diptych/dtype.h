// Element types: one row each, with DLPack's code for the type.
#pragma once

#include <cstdint>

namespace diptych {

enum class DType : int32_t { f32, f16, bf16, e4m3, e5m2, e8m0, u8, i32, i64, e2m1, f64, count_ };

struct DTypeRow {
  DType id;
  const char* name;  // as torch, jax and ml_dtypes spell it
  int32_t bytes;
  uint8_t dl_code;  // DLDataTypeCode
  float max;        // largest finite value; 0 where it has no meaning here
};

// clang-format off
inline constexpr DTypeRow kDTypes[] = {
    {DType::f32,  "float32",        4,  2, 3.4028234663852886e38f},
    {DType::f16,  "float16",        2,  2, 65504.0f},
    {DType::bf16, "bfloat16",       2,  4, 3.3895313892515355e38f},
    {DType::e4m3, "float8_e4m3fn",  1, 10, 448.0f},
    {DType::e5m2, "float8_e5m2",    1, 12, 57344.0f},
    {DType::e8m0, "float8_e8m0fnu", 1, 14, 0.0f},
    {DType::u8,   "uint8",          1,  1, 0.0f},
    {DType::i32,  "int32",          4,  0, 0.0f},
    {DType::i64,  "int64",          8,  0, 0.0f},
    {DType::e2m1, "float4_e2m1fn",  1, 17, 6.0f},  // an element only: its tensors are uint8, two elements a byte
    {DType::f64,  "float64",        8,  2, 0.0f},  // only for permutations, whose gradients are checked in it
};
// clang-format on
static_assert(sizeof(kDTypes) / sizeof(kDTypes[0]) == static_cast<int>(DType::count_));

constexpr const DTypeRow& row(DType d) { return kDTypes[static_cast<int>(d)]; }
constexpr int32_t bytes(DType d) { return row(d).bytes; }
constexpr const char* name(DType d) { return row(d).name; }
constexpr bool is_high_precision(DType d) { return d == DType::f32 || d == DType::f16 || d == DType::bf16; }

}  // namespace diptych
