// statistics (NUMERICS 11): a thread block takes a part, a thread a lane, and the last kernel adds the parts.
//
// Tensors of one part take one launch, others two. float64 of several parts takes one more before, which finds the
// largest magnitude.
#include "cuda/base/codec.cuh"
#include "cuda/base/launch.cuh"
#include "diptych/statistics.h"

namespace diptych::cuda {
namespace {

using Count = unsigned long long;  // what atomicAdd takes

constexpr int kThreads = kSumLanes, kAhead = 4;  // kAhead: elements that a thread loads before it adds them
constexpr double kLargest = 1.7976931348623157e308, kSmallestNormal = 2.2250738585072014e-308;

struct StatisticsParams {
  const void* x;
  int64_t n, rows;  // elements, and rows of a part
  Moments* parts;
  double* out;
  bool rounded;                   // the statistics are those of errors
  const float *result, *largest;  // read if `rounded`: what x was rounded to, and the most that it can be
  float beyond;
};

__device__ __forceinline__ float half_bits(uint16_t x) {
  __half_raw raw;
  raw.x = x;
  return __half2float(__half(raw));
}

template <Number number>
constexpr uint32_t kSmallestNormalBits = smallest_normal(number);

// How an element is stored, and its value, as float32 where that represents it exactly.
template <Number number>
struct Element;
#define DIPTYCH_ELEMENT(number, Storage, value)                            \
  template <>                                                              \
  struct Element<Number::number> {                                         \
    using Type = Storage;                                                  \
    __device__ __forceinline__ static auto of(Storage x) { return value; } \
  };
DIPTYCH_ELEMENT(f64, double, x)
DIPTYCH_ELEMENT(f32, float, x)
DIPTYCH_ELEMENT(f16, uint16_t, half_bits(x))
DIPTYCH_ELEMENT(bf16, uint16_t, float_of(static_cast<uint32_t>(x) << 16))
DIPTYCH_ELEMENT(e4m3, uint8_t, decode2<false>(x).x)
DIPTYCH_ELEMENT(e5m2, uint8_t, decode2<true>(x).x)
DIPTYCH_ELEMENT(e8m0, uint8_t, e8m0_to_float(x))
DIPTYCH_ELEMENT(i64, int64_t, static_cast<double>(x))
DIPTYCH_ELEMENT(i32, int32_t, static_cast<double>(x))
DIPTYCH_ELEMENT(i16, int16_t, static_cast<float>(x))
DIPTYCH_ELEMENT(i8, int8_t, static_cast<float>(x))
DIPTYCH_ELEMENT(u64, uint64_t, static_cast<double>(x))
DIPTYCH_ELEMENT(u32, uint32_t, static_cast<double>(x))
DIPTYCH_ELEMENT(u16, uint16_t, static_cast<float>(x))
DIPTYCH_ELEMENT(u8, uint8_t, static_cast<float>(x))
#undef DIPTYCH_ELEMENT

// What a thread knows of its lane. A lane has fewer than 2^32 elements.
struct Lane {
  double sum = 0, squares = 0, largest = 0;
  uint32_t zero = 0, nan = 0, infinite = 0, subnormal = 0, clipped = 0, flushed = 0;

  template <Number number>
  __device__ __forceinline__ void add(float x, double) {
    constexpr uint32_t least = kSmallestNormalBits<number>;
    const uint32_t magnitude = bits_of(x) & 0x7FFFFFFF;
    zero += magnitude == 0;
    nan += magnitude > 0x7F800000;
    infinite += magnitude == 0x7F800000;
    if constexpr (least > 0) subnormal += magnitude != 0 && magnitude < least;
    if (magnitude < 0x7F800000) add_finite(static_cast<double>(x), static_cast<double>(float_of(magnitude)));
  }
  template <Number number>
  __device__ __forceinline__ void add(double x, double scale) {
    const double magnitude = fabs(x);
    zero += magnitude == 0;
    nan += magnitude != magnitude;
    infinite += magnitude > kLargest;
    subnormal += number == Number::f64 && magnitude > 0 && magnitude < kSmallestNormal;
    if (magnitude <= kLargest) add_finite(x * scale, magnitude);
  }
  // The error of an element that was rounded.
  __device__ __forceinline__ void add_error(float x, float result, float most, float beyond) {
    const float magnitude = fabsf(x);
    clipped += fabsf(result) == most && magnitude > most * beyond;
    flushed += magnitude != 0 && result == 0;
    add<Number::f32>(bits_of(magnitude) < 0x7F800000 ? result - x : float_of(0x7FC00000), 1);
  }

 private:
  __device__ __forceinline__ void add_finite(double v, double magnitude) {
    sum += v, squares += v * v;
    largest = magnitude > largest ? magnitude : largest;
  }
};

// Adds v of all threads: thread i gets that of thread i + half, for half = threads / 2, ..., 1. Thread 0 returns the
// sum. Maxima need no order and take the same way.
template <int threads, typename Combine>
__device__ __forceinline__ double folded(double v, double* shared, Combine combine) {
  shared[threadIdx.x] = v;
  __syncthreads();
  for (int half = threads / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half)
      shared[threadIdx.x] = combine(shared[threadIdx.x], shared[threadIdx.x + half]);
    __syncthreads();
  }
  const double result = shared[0];
  __syncthreads();
  return result;
}
struct Add {
  __device__ __forceinline__ double operator()(double a, double b) const { return a + b; }
};
struct Max {
  __device__ __forceinline__ double operator()(double a, double b) const { return a > b ? a : b; }
};

// Combines what each thread has; every thread returns all of it.
template <int threads>
__device__ __forceinline__ Moments combined(const Moments& m) {
  __shared__ double shared[threads];
  __shared__ Count counts[6];
  if (threadIdx.x < 6) counts[threadIdx.x] = 0;
  __syncthreads();
  const int64_t own[6] = {m.zero, m.nan, m.infinite, m.subnormal, m.clipped, m.flushed};
#pragma unroll
  for (int i = 0; i < 6; ++i)
    if (own[i] != 0) atomicAdd(&counts[i], static_cast<Count>(own[i]));
  Moments all;
  all.sum = folded<threads>(m.sum, shared, Add());  // begins and ends with a barrier
  all.squares = folded<threads>(m.squares, shared, Add());
  all.largest = folded<threads>(m.largest, shared, Max());
  all.zero = counts[0], all.nan = counts[1], all.infinite = counts[2], all.subnormal = counts[3];
  all.clipped = counts[4], all.flushed = counts[5];
  return all;
}

// The exponent of the power of two by which float64 values are divided.
__device__ __forceinline__ int exponent_of(double largest) {
  return largest > 0 ? min(max(ilogb(largest), -1022), 1022) : 0;
}
__device__ __forceinline__ double power(int exponent) {
  return __builtin_bit_cast(double, static_cast<int64_t>(exponent + 1023) << 52);
}

__device__ __forceinline__ void finish(const Moments& m, const StatisticsParams& p, int exponent) {
  double* out = p.out;
  const int64_t finite = p.n - m.nan - m.infinite;
  const double count = static_cast<double>(finite > 1 ? finite : 1), unit = power(exponent);
  const double mean = m.sum / count * unit, rms = sqrt(m.squares / count) * unit;  // rounded sums may lie beyond amax
  out[0] = m.largest, out[1] = min(max(mean, -m.largest), m.largest), out[2] = min(rms, m.largest);
  out[3] = static_cast<double>(m.zero), out[4] = static_cast<double>(m.nan);
  out[5] = static_cast<double>(m.infinite), out[6] = static_cast<double>(m.subnormal);
  if (p.rounded) out[7] = static_cast<double>(m.clipped), out[8] = static_cast<double>(m.flushed);
}

// Calls body(value, index) for each of the thread's elements of a part, in ascending order.
template <Number number, typename Body>
__device__ __forceinline__ void for_lane(const StatisticsParams& p, int64_t part, Body body) {
  using Type = typename Element<number>::Type;
  const Type* x = static_cast<const Type*>(p.x);
  const int64_t first = part * p.rows * kSumLanes + threadIdx.x, end = min(p.n, (part + 1) * p.rows * kSumLanes);
  int64_t i = first;
  for (; i + (kAhead - 1) * kSumLanes < end; i += kAhead * kSumLanes) {
    Type loaded[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) loaded[j] = x[i + j * kSumLanes];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) body(Element<number>::of(loaded[j]), i + j * kSumLanes);
  }
  for (; i < end; i += kSumLanes) body(Element<number>::of(x[i]), i);
}

__device__ __forceinline__ double largest_of(const StatisticsParams& p, int64_t part) {
  double largest = 0;
  for_lane<Number::f64>(p, part, [&](double x, int64_t) {
    const double magnitude = fabs(x);
    if (magnitude <= kLargest && magnitude > largest) largest = magnitude;
  });
  __shared__ double shared[kThreads];
  return folded<kThreads>(largest, shared, Max());
}

__global__ void __launch_bounds__(kThreads) largest_kernel(const __grid_constant__ StatisticsParams p) {
  const double largest = largest_of(p, blockIdx.x);
  if (threadIdx.x == 0) p.parts[blockIdx.x].largest = largest;
}

template <Number number, bool rounded>
__global__ void __launch_bounds__(kThreads) statistics_kernel(const __grid_constant__ StatisticsParams p) {
  const bool alone = gridDim.x == 1;
  int exponent = 0;
  if constexpr (number == Number::f64) {
    double largest = 0;
    if (alone) {
      largest = largest_of(p, 0);
    } else {  // largest_kernel has found those of all parts
      __shared__ double shared[kThreads];
      for (int i = threadIdx.x; i < static_cast<int>(gridDim.x); i += kThreads)
        largest = max(largest, p.parts[i].largest);
      largest = folded<kThreads>(largest, shared, Max());
    }
    exponent = exponent_of(largest);
  }
  const double scale = power(-exponent);
  Lane lane;
  for_lane<number>(p, blockIdx.x, [&](auto x, int64_t i) {
    if constexpr (rounded) {
      lane.add_error(x, p.result[i], p.largest[i], p.beyond);
    } else {
      lane.template add<number>(x, scale);
    }
  });
  Moments m = combined<kThreads>({lane.sum, lane.squares, lane.largest, lane.zero, lane.nan, lane.infinite,
                                  lane.subnormal, lane.clipped, lane.flushed});
  if (threadIdx.x != 0) return;
  if (alone) return finish(m, p, exponent);
  Moments& part = p.parts[blockIdx.x];
  part.sum = m.sum, part.squares = m.squares;
  if (number != Number::f64) part.largest = m.largest;  // else other thread blocks read it now
  part.zero = m.zero, part.nan = m.nan, part.infinite = m.infinite, part.subnormal = m.subnormal;
  part.clipped = m.clipped, part.flushed = m.flushed;
}

__global__ void __launch_bounds__(kMostParts)
    finish_kernel(const __grid_constant__ StatisticsParams p, int parts, bool scaled) {
  const int i = threadIdx.x;
  const Moments all = combined<kMostParts>(i < parts ? p.parts[i] : Moments{});
  if (i == 0) finish(all, p, scaled ? exponent_of(all.largest) : 0);
}

template <Number number, bool rounded = false>
Status run(const StatisticsParams& p, const Execution& exec) {
  constexpr bool scaled = number == Number::f64;
  const int64_t parts = std::max<int64_t>(part_count(p.n), 1);
  if (scaled && parts > 1) DIPTYCH_TRY(launch("statistics", largest_kernel, parts, kThreads, 0, exec.stream, p));
  DIPTYCH_TRY(launch("statistics", statistics_kernel<number, rounded>, parts, kThreads, 0, exec.stream, p));
  if (parts == 1) return {};
  return launch("statistics", finish_kernel, 1, kMostParts, 0, exec.stream, p, static_cast<int>(parts), scaled);
}

}  // namespace

Status statistics(const StatisticsArgs& a, const Execution& exec) {
  StatisticsParams p{a.x.data, a.x.numel() * bytes(a.x.dtype) / row(a.number).bytes};
  p.rows = rows_of_part(p.n);
  p.parts = a.workspace.as<Moments>();
  p.out = a.out.as<double>();
  using enum Number;
  if (a.result.given()) {
    p.rounded = true, p.result = a.result.as<float>(), p.largest = a.largest.as<float>(), p.beyond = a.beyond;
    return a.number == f32    ? run<f32, true>(p, exec)
           : a.number == bf16 ? run<bf16, true>(p, exec)
                              : run<f16, true>(p, exec);
  }
  switch (a.number) {
#define DIPTYCH_CASE(number) \
  case number:               \
    return run<number>(p, exec);
    DIPTYCH_CASE(f64)
    DIPTYCH_CASE(f32)
    DIPTYCH_CASE(f16)
    DIPTYCH_CASE(bf16)
    DIPTYCH_CASE(e4m3)
    DIPTYCH_CASE(e5m2)
    DIPTYCH_CASE(e8m0)
    DIPTYCH_CASE(i64)
    DIPTYCH_CASE(i32)
    DIPTYCH_CASE(i16)
    DIPTYCH_CASE(i8)
    DIPTYCH_CASE(u64)
    DIPTYCH_CASE(u32)
    DIPTYCH_CASE(u16)
    DIPTYCH_CASE(u8)
#undef DIPTYCH_CASE
    case count_:
      break;
  }
  return {Code::value, "statistics: unknown number"};
}

}  // namespace diptych::cuda
