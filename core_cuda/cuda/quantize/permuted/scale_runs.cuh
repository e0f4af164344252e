// Scales of tiles, written in two steps. In their final place a tile's scales are 4 bytes in each of 128 rows, and
// writing those costs L2 as much as whole sectors of 32 bytes. So a tile first writes its scales as a contiguous run,
// in memory that finally holds its own and its neighbours' scales, and a second kernel puts that memory in order.
#pragma once

#include "cuda/permute/origin.cuh"
#include "cuda/quantize/tiles.cuh"

namespace diptych::cuda {

// Scales [rows, tiles] in words, each of a float32 scale or four E8M0 codes. For each 128 rows, groups of `each` tiles
// share the memory of their scales: one piece of `each` words in each row. The group's runs fill these pieces from the
// first to the last.
class ScaleRuns {
 public:
  ScaleRuns() = default;
  ScaleRuns(void* data, int64_t rows, int64_t tiles)
      : data_(static_cast<uint32_t*>(data)),
        rows_(rows),
        tiles_(static_cast<uint32_t>(tiles)),
        groups_(static_cast<uint32_t>(ceil_div(tiles, kMost))),
        each_(static_cast<uint32_t>(ceil_div(ceil_div(tiles, groups_), kSector) * kSector)) {
    groups_ = static_cast<uint32_t>(ceil_div(tiles, each_));
    by_each_ = Divider(each_), by_last_ = Divider(tiles_ - (groups_ - 1) * each_), by_groups_ = Divider(groups_);
  }

  // Returns where the scale of row row0 + i of `tile` is stored before it is put in order; i < count <= 128, row0 is a
  // multiple of 128.
  __device__ __forceinline__ uint32_t* waiting(int64_t row0, int count, uint32_t tile, int i) const {
    const Group g(*this, row0, by_each_(tile));
    return g.word((tile - g.first) * count + i);
  }

  // The thread blocks that put the scales in order, and the shared memory of one.
  int64_t blocks() const { return ceil_div(rows_, kTile) * groups_; }
  size_t shared_bytes() const { return size_t{each_} * kPitch * sizeof(uint32_t); }
  __device__ __forceinline__ void order(uint32_t block, uint32_t* held) const;

 private:
  static constexpr uint32_t kMost = 64;          // tiles of a group
  static constexpr uint32_t kSector = 8;         // words
  static constexpr uint32_t kPitch = kTile + 1;  // most words of a run in shared memory

  struct Group {
    uint32_t* data;  // its first word
    uint32_t first, width, tiles;
    Divider by_width;

    __device__ __forceinline__ Group(const ScaleRuns& s, int64_t row0, uint32_t index)
        : first(index * s.each_), width(min(s.each_, s.tiles_ - first)), tiles(s.tiles_) {
      data = s.data_ + row0 * tiles + first;
      by_width = width == s.each_ ? s.by_each_ : s.by_last_;
    }
    // Returns the address of word n of the group's memory.
    __device__ __forceinline__ uint32_t* word(uint32_t n) const {
      const uint32_t piece = by_width(n);
      return data + (static_cast<int64_t>(piece) * tiles + (n - piece * width));
    }
  };

  uint32_t* data_ = nullptr;
  int64_t rows_ = 0;
  uint32_t tiles_ = 0, groups_ = 0, each_ = 0;
  Divider by_each_, by_last_, by_groups_;
};

// Puts both copies' scales in order, after the kernel that wrote them; `columns` may be empty.
Status order_scales(const ScaleRuns& rows, const ScaleRuns& columns, const Execution&);

}  // namespace diptych::cuda
