// Eight neighbouring elements of any high-precision type as floats. The type is a run-time argument, the same for all
// threads of a kernel.
#pragma once

#include "cuda/base/vector.cuh"
#include "diptych/tensor.h"

namespace diptych::cuda {

struct Floats8 {
  float v[8];
};

// A tensor whose type is known at run time; null data: absent.
struct Elements {
  void* data = nullptr;
  DType type = DType::f32;

  Elements() = default;
  explicit Elements(const TensorView& t) : data(t.given() ? t.data : nullptr), type(t.dtype) {}
};

__device__ __forceinline__ float load_element(const Elements& t, int64_t i) {
  if (t.type == DType::f32) return static_cast<const float*>(t.data)[i];
  if (t.type == DType::f16) return to_float(static_cast<const __half*>(t.data)[i]);
  return to_float(static_cast<const __nv_bfloat16*>(t.data)[i]);
}

__device__ __forceinline__ void store_element(const Elements& t, int64_t i, float x) {
  if (t.type == DType::f32) {
    static_cast<float*>(t.data)[i] = x;
  } else if (t.type == DType::f16) {
    static_cast<__half*>(t.data)[i] = from_float<__half>(x);
  } else {
    static_cast<__nv_bfloat16*>(t.data)[i] = from_float<__nv_bfloat16>(x);
  }
}

template <typename T>
__device__ __forceinline__ Floats8 as_floats(const Row8<T>& r) {
  Floats8 f;
#pragma unroll
  for (int j = 0; j < 8; ++j) f.v[j] = r[j];
  return f;
}
__device__ __forceinline__ Floats8 as_floats(const Floats8& f) { return f; }

__device__ __forceinline__ Floats8 without_inf(Floats8 f) {
#pragma unroll
  for (int j = 0; j < 8; ++j) f.v[j] = without_inf(f.v[j]);
  return f;
}

__device__ __forceinline__ float max_abs(float m, const Floats8& f) {
#pragma unroll
  for (int j = 0; j < 8; ++j) m = max_abs(m, f.v[j]);
  return m;
}

// Eight elements, aligned to 16 bytes.
template <typename T>
__device__ __forceinline__ Row8<T> load_vectors(const void* base, int64_t at) {
  Row8<T> r;
#pragma unroll
  for (int i = 0; i < Row8<T>::kVecs; ++i) {
    r.v[i] = Vec<T>::load(static_cast<const T*>(base) + at + i * Vec<T>::kCount);
  }
  return r;
}

// Loads elements at .. at + count - 1 (count <= 8); the others are 0. `vec`: count is 8, and they are aligned to 16
// bytes.
__device__ __forceinline__ Floats8 load8(const Elements& t, int64_t at, int count, bool vec) {
  if (vec) {
    if (t.type == DType::f32) return as_floats(load_vectors<float>(t.data, at));
    if (t.type == DType::f16) return as_floats(load_vectors<__half>(t.data, at));
    return as_floats(load_vectors<__nv_bfloat16>(t.data, at));
  }
  Floats8 f;
#pragma unroll
  for (int j = 0; j < 8; ++j) f.v[j] = j < count ? load_element(t, at + j) : 0.0f;
  return f;
}

// Eight elements before conversion to float, if their type T is known at compile time; floats if T is void.
template <typename T>
using Raw8 = std::conditional_t<std::is_void_v<T>, Floats8, Row8<std::conditional_t<std::is_void_v<T>, float, T>>>;

// Loads like load8; with a known type, all eight elements or (count 0) none.
template <typename T>
__device__ __forceinline__ Raw8<T> load_raw8(const Elements& t, int64_t at, int count, bool vec) {
  if constexpr (std::is_void_v<T>) {
    return load8(t, at, count, vec);
  } else {
    return count > 0 ? load_vectors<T>(t.data, at) : Row8<T>();
  }
}

__device__ __forceinline__ void store8(const Elements& t, int64_t at, int count, bool vec, const Floats8& f) {
  if (!vec) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < count) store_element(t, at + j, f.v[j]);
    }
  } else if (t.type == DType::f32) {
    float4* p = reinterpret_cast<float4*>(static_cast<float*>(t.data) + at);
    p[0] = make_float4(f.v[0], f.v[1], f.v[2], f.v[3]), p[1] = make_float4(f.v[4], f.v[5], f.v[6], f.v[7]);
  } else {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      w[j] = t.type == DType::f16 ? pack2<__half>(f.v[2 * j], f.v[2 * j + 1])
                                  : pack2<__nv_bfloat16>(f.v[2 * j], f.v[2 * j + 1]);
    }
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(t.data) + at) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

}  // namespace diptych::cuda
