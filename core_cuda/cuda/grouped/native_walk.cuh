// The native kernel's tiles: a persistent thread block walks them in order, clusters side by side.
#pragma once

#include "cuda/grouped/native.h"
#include "cuda/grouped/walk.cuh"

namespace diptych::cuda {

struct Table {
  int begin[kNativeMaxGroups + 3];  // boundaries of the spans
  int first[kNativeMaxGroups + 3];  // rows: number of each span's first tile
};

__device__ __forceinline__ int tiles_of(int rows) { return (rows + kNativeTileM - 1) / kNativeTileM; }

// By one warp.
__device__ __forceinline__ void fill_table(const NativeArgs& p, Table& table, int lane) {
  const Groups groups{p.offsets, p.groups, p.rows};
  int highest = 0;
  for (int base = 0; base < p.groups + 3; base += 32) {
    int v = boundary(groups, base, lane, highest);
    // The copy engine faults on boxes that begin between 16 bytes, and products take 32 k. Only a broken promise of
    // multiples is rounded here; past the last row there are zeros.
    if (p.depth && v < p.rows) v &= ~31;
    if (base + lane < p.groups + 3) table.begin[base + lane] = v;
  }
  __syncwarp();
  if (p.depth) return;
  if (lane == 0) table.first[0] = 0;
  int total = 0;
  for (int base = 0; base < p.groups + 2; base += 32) {
    const int s = base + lane;
    const int count = s < p.groups + 2 ? tiles_of(table.begin[s + 1] - table.begin[s]) * p.columns : 0;
    const int sum = total + running_sum(count, lane);
    if (s < p.groups + 2) table.first[s + 1] = sum;
    total = __shfl_sync(kAllLanes, sum, 31);
  }
}

struct Tile {
  int group;         // -1: none
  int row, row_end;  // of A's outer dimension
  int col;           // of this thread block
  int k, k_end;      // of the reduced dimension
  int64_t d_row;     // D's row of A's row 0

  __device__ __forceinline__ int blocks() const { return (k_end - k + kNativeTileK - 1) / kNativeTileK; }
};

// Used by whole warps; every warp walks by itself.
class Walker {
 public:
  __device__ __forceinline__ Walker(const NativeArgs& p, const Table& table, int rank, int ranks)
      : p_(p), table_(table), lane_(threadIdx.x % 32), rank_(rank), ranks_(ranks) {
    next_ = blockIdx.x / ranks;
    step_ = gridDim.x / ranks;
  }

  __device__ __forceinline__ bool next(Tile& t) {
    const int now = next_;
    next_ += step_;
    int local, height;
    if (p_.depth) {
      const int in_group = p_.tiles_m * p_.columns;
      const int group = now / in_group;
      if (group >= p_.groups) return false;
      local = now - group * in_group, height = p_.tiles_m;
      t.group = group, t.row = 0, t.row_end = p_.m;
      t.k = table_.begin[group + 1], t.k_end = table_.begin[group + 2];
      t.d_row = static_cast<int64_t>(group) * p_.m;
    } else {
      for (;;) {  // past spans that end before this tile
        const int at = span_ + 1 + lane_;
        const bool past = at < p_.groups + 3 && table_.first[at] <= now;
        const int passed = __popc(__ballot_sync(kAllLanes, past));
        span_ += passed;
        if (passed < 32) break;
      }
      if (span_ > p_.groups + 1) return false;
      const bool routed = span_ > 0 && span_ <= p_.groups;
      t.row = table_.begin[span_], t.row_end = table_.begin[span_ + 1];
      local = now - table_.first[span_], height = tiles_of(t.row_end - t.row);
      t.group = routed ? span_ - 1 : -1;
      t.k = 0, t.k_end = routed ? p_.k : 0;
      t.d_row = 0;
    }
    const int band = local / (p_.swath * p_.columns), in_band = local - band * p_.swath * p_.columns;
    const int rows = min(p_.swath, height - band * p_.swath);
    const int column = in_band / rows;
    t.row += (band * p_.swath + in_band - column * rows) * kNativeTileM;
    t.col = (column * ranks_ + rank_) * kNativeTileN;
    return true;
  }

 private:
  const NativeArgs& p_;
  const Table& table_;
  int lane_, rank_, ranks_;
  int next_, step_, span_ = 0;
};

}  // namespace diptych::cuda
