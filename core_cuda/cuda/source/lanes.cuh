// How thread blocks cover a tensor that is read once: threads are arranged along groups of eight columns, and the
// remaining ones down the rows.
#pragma once

#include "cuda/source/source.cuh"

namespace diptych::cuda {

constexpr int kLaneThreads = 256;

struct Lanes {
  int64_t cols = 0;     // columns that threads run along
  int log_wide = 0;     // 2^log_wide threads along the columns
  unsigned strips = 0;  // blocks along the columns
  int64_t rows = 0;     // rows of a thread block
  int64_t blocks = 0;

  // Returns how many rows a thread block takes at once.
  __device__ __forceinline__ int down() const { return kLaneThreads >> log_wide; }
  __device__ __forceinline__ int64_t col() const {
    const int wide = 1 << log_wide;
    return (static_cast<int64_t>(blockIdx.x % strips) * wide + threadIdx.x % wide) * 8;
  }
  __device__ __forceinline__ int64_t first_row() const { return static_cast<int64_t>(blockIdx.x / strips) * rows; }
  __device__ __forceinline__ int64_t row() const { return first_row() + (threadIdx.x >> log_wide); }
};

// Returns the arrangement for a source that In reads. For the typed gradient of a gated activation, threads run along
// the columns of one half and compute both halves. Each thread takes `unit` rows, or if `wanted` is not 0, the multiple
// of `unit` rows that gives about `wanted` thread blocks.
template <typename In>
Lanes lanes_of(const SourceArgs& p, int unit, int64_t wanted) {
  Lanes l;
  l.cols = kTypedGrad<In> ? p.f : p.k;
  const int64_t groups = ceil_div(l.cols, 8);
  int64_t wide = kLaneThreads;
  const auto covered = [&](int64_t w) { return ceil_div(groups, w) * w; };
  for (int64_t w = wide / 2; w >= 32 || w >= groups; w /= 2) {
    if (covered(w) < covered(wide)) wide = w;
  }
  while (int64_t{1} << l.log_wide < wide) ++l.log_wide;
  const int64_t strips = ceil_div(groups, wide), least = kLaneThreads / wide * unit;
  l.strips = static_cast<unsigned>(strips);
  const int64_t parts = wanted > strips ? wanted / strips : 1;
  l.rows = wanted > 0 ? ceil_div(ceil_div(p.m, parts), least) * least : least;
  l.blocks = ceil_div(p.m, l.rows) * strips;
  return l;
}

// Calls with_source with the type of x.
template <typename F>
Status with_any_source(const SourceArgs& p, F&& f) {
  if (p.x.type == DType::f32) return with_source<float>(p, f);
  return p.x.type == DType::f16 ? with_source<__half>(p, f) : with_source<__nv_bfloat16>(p, f);
}

}  // namespace diptych::cuda
