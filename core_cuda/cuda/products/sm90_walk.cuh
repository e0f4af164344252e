// The order of the native kernel's tiles, which persistent clusters of two thread blocks walk. The two thread blocks
// take tiles one below the other and share B's tile, as long as a group has two such tiles; in its last, odd row of
// tiles they take tiles side by side and share A's. Tall tiles all lie side by side.
#pragma once

#include "cuda/grouped/walk.cuh"
#include "cuda/products/sm90.h"

namespace diptych::cuda {

struct Table {
  int units[kNativeMaxGroups + 1];  // rows, decoded: the number of each group's first unit; the last is their count
  int begin[kNativeMaxGroups + 3];  // boundaries of the spans
  int first[kNativeMaxGroups + 3];  // rows: the number of each span's first pair of tiles
};

constexpr int kSwath = 8;  // pairs along m that are walked before the next column

// nvcc refuses to call a member function of a constant in device code.
template <TileShape kTile>
constexpr bool kBeside = kTile.beside();

template <TileShape kTile>
__device__ __forceinline__ int tiles_of(int rows) {
  return (rows + kTile.m - 1) / kTile.m;
}
// Returns how many pairs of tiles the clusters take for so many rows.
template <TileShape kTile>
__device__ __forceinline__ int pairs_of(int rows, int columns) {
  const int tiles = tiles_of<kTile>(rows);
  if constexpr (kBeside<kTile>) return tiles * ((columns + 1) / 2);
  return tiles / 2 * columns + tiles % 2 * ((columns + 1) / 2);
}

// Fills the table. One warp calls it.
template <TileShape kTile>
__device__ __forceinline__ void fill_table(const NativeArgs& p, Table& table, int lane) {
  const Groups groups{p.offsets, p.before + p.groups, p.rows};
  int highest = 0;
  for (int base = 0; base < p.before + p.groups + 3; base += 32) {
    int v = boundary(groups, base, lane, highest);
    // The copy engine faults on boxes that do not begin at a multiple of 16 bytes, and one product instruction takes 32
    // bytes of k. Rounding changes only offsets that break the promise of `align`; past the last row there are zeros.
    if (p.depth) v = v < p.rows ? v * p.element_bytes & ~31 : v * p.element_bytes;
    const int at = base + lane - p.before;
    if (at >= 0 && at < p.groups + 3) table.begin[at] = v;
  }
  __syncwarp();
  if (p.depth) return;
  if (lane == 0) {
    table.first[0] = 0;
    if (p.before > 0) table.begin[0] = table.begin[1];
    if (!p.last) table.begin[p.groups + 2] = table.begin[p.groups + 1];
  }
  __syncwarp();
  int total = 0;
  for (int base = 0; base < p.groups + 2; base += 32) {
    const int s = base + lane;
    const int count = s < p.groups + 2 ? pairs_of<kTile>(table.begin[s + 1] - table.begin[s], p.columns) : 0;
    const int sum = total + running_sum(count, lane);
    if (s < p.groups + 2) table.first[s + 1] = sum;
    total = __shfl_sync(kAllLanes, sum, 31);
  }
}

constexpr int kNoMoreTiles = -2;

struct Tile {
  int group;         // -1: rows in no group; kNoMoreTiles: past the last tile
  int row, row_end;  // range of A's outer dimension
  int col;
  bool below;     // the cluster's tiles lie one below the other
  int k, k_end;   // range of the reduced dimension, in bytes
  int64_t d_row;  // the row of D where A's row 0 goes

  __device__ __forceinline__ int blocks() const { return (k_end - k + kNativeTileK - 1) / kNativeTileK; }
};

// Finds a thread block's tiles, one after another. All lanes of a warp call it, and each warp walks by itself.
template <TileShape kTile>
class Walker {
 public:
  __device__ __forceinline__ Walker(const NativeArgs& p, const Table& table, int rank)
      : p_(p), table_(table), lane_(threadIdx.x % 32), rank_(rank), next_(blockIdx.x / kNativeCluster) {}

  __device__ __forceinline__ bool next(Tile& t) {
    const int now = next_;
    next_ += gridDim.x / kNativeCluster;
    int local;
    if (p_.depth) {
      const int in_group = pairs_of<kTile>(p_.m, p_.columns), group = now / in_group;
      if (group >= p_.groups) return false;
      local = now - group * in_group;
      t.group = group, t.row = 0, t.row_end = p_.m;
      t.k = table_.begin[group + 1], t.k_end = table_.begin[group + 2];
      t.d_row = static_cast<int64_t>(group) * p_.d_rows;
    } else {
      for (;;) {  // skips spans that end before this tile
        const int at = span_ + 1 + lane_;
        const bool past = at < p_.groups + 3 && table_.first[at] <= now;
        const int passed = __popc(__ballot_sync(kAllLanes, past));
        span_ += passed;
        if (passed < 32) break;
      }
      if (span_ > p_.groups + 1) return false;
      const bool routed = span_ > 0 && span_ <= p_.groups;
      t.row = table_.begin[span_], t.row_end = table_.begin[span_ + 1];
      local = now - table_.first[span_];
      t.group = routed ? span_ - 1 : -1;
      t.k = 0, t.k_end = routed ? p_.k : 0;
      t.d_row = 0;
    }
    const int tiles = tiles_of<kTile>(t.row_end - t.row);
    if constexpr (kBeside<kTile>) {
      const int columns = (p_.columns + 1) / 2, band = local / (kSwath * columns);
      const int in_band = local - band * kSwath * columns, height = min(kSwath, tiles - band * kSwath);
      const int column = in_band / height;
      t.below = false;
      t.row += (band * kSwath + in_band - column * height) * kTile.m;
      t.col = (column * 2 + rank_) * kTile.n;  // may lie past N
      return true;
    }
    const int pairs = tiles / 2;
    t.below = local < pairs * p_.columns;
    if (t.below) {
      const int band = local / (kSwath * p_.columns), in_band = local - band * kSwath * p_.columns;
      const int height = min(kSwath, pairs - band * kSwath), column = in_band / height;
      t.row += ((band * kSwath + in_band - column * height) * 2 + rank_) * kTile.m;
      t.col = column * kTile.n;
    } else {
      t.row += pairs * 2 * kTile.m;
      t.col = ((local - pairs * p_.columns) * 2 + rank_) * kTile.n;  // may lie past N
    }
    return true;
  }

 private:
  const NativeArgs& p_;
  const Table& table_;
  int lane_, rank_;
  int next_, span_ = 0;
};

}  // namespace diptych::cuda
