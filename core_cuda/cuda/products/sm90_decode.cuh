// Decodes MXFP8 and NVFP4 to bfloat16 while the same kernel multiplies. Two warps of each thread block decode as one
// team, or six by themselves. Teams take units of 128 x 128 elements by a global counter, in about the order in which
// the tiles need them. A decoded unit is stored to device memory, and the copy engine fetches it once the unit's flag
// is set. Warps that decode never wait for others, so every unit gets decoded, whichever thread blocks run at the same
// time.
#pragma once

#include "cuda/gemm/emulated_operand.cuh"
#include "cuda/products/sm90_walk.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/signal.cuh"

namespace diptych::cuda {

constexpr int kFewDecoders = 64, kManyDecoders = 192;  // threads that decode
constexpr int kDecodeBarrier = 4;  // the first named barrier of those who decode; storing warpgroups use 1 to 3

struct DecodeShared {
  // Two each for both multiplying warpgroups, which help at first, and for each team that only decodes.
  uint32_t ticket[2 + kManyDecoders / 32][2];
};

// The panels of A that contain rows of group `g` and none of an earlier group.
struct Panels {
  int begin, end;
};
__device__ __forceinline__ Panels panels_of(const Table& table, int g) {
  const int begin = table.begin[g + 1], end = (table.begin[g + 2] + kDecodedOuter - 1) / kDecodedOuter;
  const bool first = begin == table.begin[1];
  return {first ? begin / kDecodedOuter : (begin + kDecodedOuter - 1) / kDecodedOuter, end};
}

// Fills Table::units. One warp calls it.
__device__ __forceinline__ void fill_units(const NativeArgs& p, Table& table, int lane) {
  int total = 0;
  if (lane == 0) table.units[0] = 0;
  for (int base = 0; base < p.groups && !p.depth; base += 32) {
    const int g = base + lane;
    int count = 0;
    if (g < p.groups && table.begin[g + 1] < table.begin[g + 2]) {
      const Panels a = panels_of(table, g);
      count = (a.end - a.begin + p.decoded[1].panels) * p.units_k;
    }
    const int sum = total + running_sum(count, lane);
    if (g < p.groups) table.units[g + 1] = sum;
    total = __shfl_sync(kAllLanes, sum, 31);
  }
}

constexpr TileShape kDecodedTile = tile_shape(Promotion::none, false);
constexpr int kTilePanels = kDecodedTile.n / kDecodedOuter;  // panels of B in a tile

struct Unit {
  bool of_b;
  int stack, panel, k;  // k counts units
};

// Returns the number of units. For kind depth only units that contain rows of a group count.
__device__ __forceinline__ int units_of(const NativeArgs& p, const Table& table) {
  if (!p.depth) return table.units[p.groups];
  const int unit = kDecodedK * p.element_bytes;
  const int first = table.begin[1] / unit, end = (table.begin[p.groups + 1] + unit - 1) / unit;
  return (end - first) * (p.decoded[0].panels + p.decoded[1].panels);
}

// Sets `u` to unit `number` in the order of decoding; returns false past the last unit.
__device__ __forceinline__ bool find_unit(const NativeArgs& p, const Table& table, uint32_t number, Unit& u) {
  if (number >= static_cast<uint32_t>(units_of(p, table))) return false;
  if (p.depth) {
    const int unit = kDecodedK * p.element_bytes, all = p.decoded[0].panels + p.decoded[1].panels;
    const int first = table.begin[1] / unit;
    const int at = static_cast<int>(number) % all;
    u.k = first + static_cast<int>(number) / all, u.stack = 0;
    u.of_b = at >= p.decoded[0].panels, u.panel = u.of_b ? at - p.decoded[0].panels : at;
    return true;
  }
  int g = 0;  // the last group that begins at or before the unit
  for (int step = 256; step > 0; step /= 2) {
    if (g + step < p.groups && table.units[g + step] <= static_cast<int>(number)) g += step;
  }
  const Panels a = panels_of(table, g);
  const int local = static_cast<int>(number) - table.units[g], all_a = a.end - a.begin, all_b = p.decoded[1].panels;
  // The first tiles lie in a band of kSwath pairs, so the panels that they read come first, in ascending k. The other
  // panels of B follow, then those of A, each panel with all of its k.
  const int first_a = min(all_a, 2 * kSwath), pairs = max(first_a / 2, 1);
  const int clusters = gridDim.x / kNativeCluster;
  const int first_b = min(all_b, (clusters + pairs - 1) / pairs * kTilePanels);
  const int together = first_a + first_b, before = together * p.units_k, rest_b = (all_b - first_b) * p.units_k;
  u.stack = 0;
  if (local < before) {
    const int at = local % together;
    u.k = local / together, u.of_b = at >= first_a, u.panel = u.of_b ? at - first_a : a.begin + at;
  } else {
    const int at = local - before;
    u.of_b = at < rest_b, u.k = (u.of_b ? at : at - rest_b) % p.units_k;
    u.panel = u.of_b ? first_b + at / p.units_k : a.begin + first_a + (at - rest_b) / p.units_k;
  }
  if (u.of_b) u.stack = g;
  return true;
}

__device__ __forceinline__ uint32_t* flag_of(const NativeArgs& p, bool of_b, int stack, int panel, int k) {
  const int64_t row = of_b ? p.decoded[0].panels + static_cast<int64_t>(stack) * p.decoded[1].panels + panel : panel;
  return p.units + 2 + row * p.units_k + k;
}

// ---- decoding of one unit, by a team of threads ----

template <int kThreads_>
struct Team {
  static constexpr int kThreads = kThreads_;
  int thread, barrier;  // barrier: a named barrier that only this team uses
  uint32_t* ticket;     // two words in shared memory

  __device__ __forceinline__ void sync() const {
    if constexpr (kThreads == 32) {
      __syncwarp();
    } else {
      ptx::named_sync(barrier, kThreads);
    }
  }
};

// Returns whether decode_plain is exact with this E8M0 code: its factor, the scale times the ratio of the exponents'
// biases, and all of its results but 0 must be normal bfloat16.
template <bool kE5M2>
__device__ __forceinline__ bool plain_scale(uint32_t code) {
  return kE5M2 ? code >= 17 && code <= 142 : code >= 10 && code <= 134;
}
// Returns a word whose bytes have the top bit set where the byte of `four` is NaN or infinite.
template <bool kE5M2>
__device__ __forceinline__ uint32_t special_bytes(uint32_t four) {
  return (four & 0x7f7f7f7fu) + (kE5M2 ? 0x04040404u : 0x01010101u);
}

// decode_plain multiplies four finite FP8 bytes by a scale that plain_scale accepts. It uses a byte's exponent and
// mantissa as those of a tiny bfloat16 and multiplies by plain_factor: the scale times 2^120 (E5M2: 2^112), in both
// halves of a word.
template <bool kE5M2>
__device__ __forceinline__ uint32_t plain_factor(uint32_t code) {
  return (code + (kE5M2 ? 112 : 120)) * 0x00800080u;
}
template <bool kE5M2>
__device__ __forceinline__ uint2 decode_plain(uint32_t four, uint32_t factor) {
  constexpr uint32_t kRest = kE5M2 ? 0x0fe00fe0u : 0x07f007f0u;
  const uint32_t lo = __byte_perm(four, 0, 0x1404), hi = __byte_perm(four, 0, 0x3424);
  const uint32_t a = (lo & 0x80008000u) | (lo >> (kE5M2 ? 3 : 4) & kRest);
  const uint32_t b = (hi & 0x80008000u) | (hi >> (kE5M2 ? 3 : 4) & kRest);
  return make_uint2(scale_bf16x2(a, factor), scale_bf16x2(b, factor));
}

// Returns whether decode_plain may decode these 16 elements.
template <bool kE5M2>
__device__ __forceinline__ bool plain(const uint4& w, uint32_t code) {
  const uint32_t special =
      special_bytes<kE5M2>(w.x) | special_bytes<kE5M2>(w.y) | special_bytes<kE5M2>(w.z) | special_bytes<kE5M2>(w.w);
  return (special & 0x80808080u) == 0 && plain_scale<kE5M2>(code);
}

// Decodes the bytes `w` of 16 neighbours along k. `second`: also stores the last eight.
template <DType kElement, bool kPlain>
__device__ __forceinline__ void decode16(const uint4& w, uint32_t code, uint4* to, bool second) {
  uint4 first, last;
  if constexpr (kElement == DType::e2m1) {
    const float scale = decode2<false>(code).x;
    const uint32_t both = pack2<__nv_bfloat16>(scale, scale);  // exact
    first = decode_bf16_e2m1(w.x, both), last = decode_bf16_e2m1(w.y, both);
  } else {
    constexpr bool kE5M2 = kElement == DType::e5m2;
    const uint32_t factor = plain_factor<kE5M2>(code);
    const float scale = e8m0_to_float(code);
    const auto four = [&](uint32_t bytes) {
      return kPlain ? decode_plain<kE5M2>(bytes, factor) : decode_bf16<kE5M2>(bytes, scale);
    };
    const uint2 a = four(w.x), b = four(w.y), c = four(w.z), d = four(w.w);
    first = make_uint4(a.x, a.y, b.x, b.y), last = make_uint4(c.x, c.y, d.x, d.y);
  }
  to[0] = first;
  if (second) to[1] = last;
}

// Decodes a whole unit with k innermost and block scales, by vector loads; eight threads take a row. The number of
// instructions limits the few warps that decode, so pointers advance from row to row, and several rows share one test
// for NaN.
template <DType kElement, typename Team>
__device__ __forceinline__ void decode_whole_rows(const DecodedOperand& d, const Operand& o, int outer0, int k0,
                                                  Team team) {
  constexpr bool kE2M1 = kElement == DType::e2m1, kE5M2 = kElement == DType::e5m2;
  constexpr int kRows = Team::kThreads / 8, kAtOnce = 8;
  using Load = std::conditional_t<kE2M1, uint2, uint4>;
  const int k = k0 + team.thread % 8 * 16, outer = outer0 + team.thread / 8;
  const int64_t row_bytes = o.k * static_cast<int64_t>(sizeof(Load)) / 16;
  const uint8_t* from = o.data + outer * row_bytes + k * static_cast<int>(sizeof(Load)) / 16;
  const uint8_t* codes = static_cast<const uint8_t*>(o.scale) + scale_index(o, outer, k);
  uint16_t* to = d.to + static_cast<int64_t>(outer) * d.pitch + k;
#pragma unroll 1
  for (int row = 0; row < kDecodedOuter; row += kAtOnce * kRows) {
    Load u[kAtOnce];
    uint32_t code[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, from += kRows * row_bytes, codes += kRows * o.scale_stride_outer) {
      u[i] = __ldg(reinterpret_cast<const Load*>(from));
      code[i] = __ldg(codes);
    }
    uint4 w[kAtOnce];
    bool all_plain = true;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if constexpr (kE2M1) {
        w[i] = make_uint4(u[i].x, u[i].y, 0, 0);
      } else {
        w[i] = u[i];
        all_plain = all_plain && plain<kE5M2>(w[i], code[i]);
      }
    }
    if (all_plain) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, to += kRows * d.pitch) {
        decode16<kElement, true>(w[i], code[i], reinterpret_cast<uint4*>(to), true);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, to += kRows * d.pitch) {
        decode16<kElement, false>(w[i], code[i], reinterpret_cast<uint4*>(to), true);
      }
    }
  }
}

// Decodes any unit with k innermost: of any alignment, cut by the operand's end, or with a scale per tensor.
template <DType kElement, typename Team>
__device__ __forceinline__ void decode_any_rows(const DecodedOperand& d, const Operand& o, int outer0, int k0,
                                                Team team) {
  constexpr int kBytes = kElement == DType::e2m1 ? 8 : 16;
  const int k = k0 + team.thread % 8 * 16;
  if (k >= d.pitch) return;
#pragma unroll 1
  for (int row = team.thread / 8; row < min(kDecodedOuter, o.outer - outer0); row += Team::kThreads / 8) {
    const int outer = outer0 + row;
    uint32_t words[4] = {};
    if (k < o.k) {
      const uint8_t* from = o.data + (static_cast<int64_t>(outer) * o.k + k) * kBytes / 16;
      load_bytes<kBytes>(words, from, kBytes == 8 ? 8 : o.k - k);
    }
    decode16<kElement, false>(make_uint4(words[0], words[1], words[2], words[3]), load_code(o, outer, k),
                              reinterpret_cast<uint4*>(d.to + static_cast<int64_t>(outer) * d.pitch + k),
                              k + 8 < d.pitch);
  }
}

template <DType kElement, typename Team>
__device__ __forceinline__ void decode_rows(const DecodedOperand& d, const Operand& o, int outer0, int k0, Team team) {
  const bool whole = outer0 + kDecodedOuter <= o.outer && k0 + kDecodedK <= o.k;
  if (whole && o.vec && o.kind != ScaleKind::tensor) {
    decode_whole_rows<kElement>(d, o, outer0, k0, team);
  } else {
    decode_any_rows<kElement>(d, o, outer0, k0, team);
  }
}

// Decodes four k of outer index j of a fragment of layout [k, outer] whose words are transposed.
template <bool kE5M2>
__device__ __forceinline__ uint2 decode_column(const Fragment& f, int j) {
  const uint32_t word = f.w[j % 4 * 2 + j / 4], code = f.code[j / 4] >> (j % 4 * 8) & 0xff;
  const bool plain = (special_bytes<kE5M2>(word) & 0x80808080u) == 0 && plain_scale<kE5M2>(code);
  return plain ? decode_plain<kE5M2>(word, plain_factor<kE5M2>(code)) : decode_bf16<kE5M2>(word, e8m0_to_float(code));
}

// Decodes a unit with outer indices innermost. A thread transposes eight k of eight outer indices in its registers.
// Eight neighbours take 64 k, so that each line is stored by one instruction.
template <Layout kLayout, bool kE5M2, typename Team>
__device__ __forceinline__ void decode_columns(const DecodedOperand& d, const Operand& o, int outer0, int k0,
                                               Team team) {
  const int at = team.thread / 8, first = team.thread % 8 * 8;
#pragma unroll 1
  for (int pass = 0; pass < kDecodedOuter * kDecodedK / 64; pass += Team::kThreads) {
    const int outer = outer0 + pass % kDecodedOuter, k = k0 + pass / kDecodedOuter * 64;
    Fragment f[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      f[i] = load_fragment<kLayout, false>(o, outer, k, at % 8 + at / 8 * 128 + (first / 4 + i) * 8, {});
    }
#pragma unroll
    for (Fragment& each : f) {
      transpose4x4(each.w[0], each.w[2], each.w[4], each.w[6]);  // outer 0..3: four k of one outer index in each word
      transpose4x4(each.w[1], each.w[3], each.w[5], each.w[7]);  // outer 4..7
    }
    if (k + first >= d.pitch) continue;
    uint16_t* to = d.to + static_cast<int64_t>(outer + at * 8) * d.pitch + k + first;
#pragma unroll
    for (int j = 0; j < 8; ++j, to += d.pitch) {
      if (outer + at * 8 + j >= o.outer) break;
      const uint2 lo = decode_column<kE5M2>(f[0], j), hi = decode_column<kE5M2>(f[1], j);
      *reinterpret_cast<uint4*>(to) = make_uint4(lo.x, lo.y, hi.x, hi.y);
    }
  }
}

template <bool kE5M2, typename Team>
__device__ __forceinline__ void decode_columns(const DecodedOperand& d, const Operand& o, int outer0, int k0,
                                               Team team) {
  o.vec ? decode_columns<Layout::k_outer, kE5M2>(d, o, outer0, k0, team)
        : decode_columns<Layout::either, kE5M2>(d, o, outer0, k0, team);
}

template <typename Team>
__device__ __forceinline__ void decode_unit(const DecodedOperand& all, const Unit& u, Team team) {
  DecodedOperand d = all;
  Operand& o = d.each;
  o.data += u.stack * d.data_step, o.scale = static_cast<const uint8_t*>(o.scale) + u.stack * d.scale_step;
  d.to += static_cast<int64_t>(u.stack) * d.rows * d.pitch;
  const int outer0 = d.first + u.panel * kDecodedOuter, k0 = u.k * kDecodedK;
  if (o.k_major) {
    o.element == DType::e5m2 ? decode_columns<true>(d, o, outer0, k0, team)
                             : decode_columns<false>(d, o, outer0, k0, team);
  } else if (o.element == DType::e2m1) {
    decode_rows<DType::e2m1>(d, o, outer0, k0, team);
  } else if (o.element == DType::e5m2) {
    decode_rows<DType::e5m2>(d, o, outer0, k0, team);
  } else {
    decode_rows<DType::e4m3>(d, o, outer0, k0, team);
  }
}

// Decodes `count` units, or fewer if none is left.
template <typename Team>
__device__ __forceinline__ void decode_units(const NativeArgs& p, const Table& table, int count, Team team) {
  if (count == 0) return;
  if (team.thread == 0) team.ticket[0] = ptx::next_ticket(p.units);
  team.sync();
  Unit u;
  bool more = find_unit(p, table, team.ticket[0], u);
  for (int turn = 1; more; turn ^= 1) {
    const bool next = --count > 0;
    if (next && team.thread == 0) team.ticket[turn] = ptx::next_ticket(p.units);
    uint32_t* flag = flag_of(p, u.of_b, u.stack, u.panel, u.k);
    decode_unit(p.decoded[u.of_b], u, team);
    team.sync();
    more = next && find_unit(p, table, team.ticket[turn], u);
    if (team.thread == 0) {
      ptx::engine_sees_memory();
      ptx::publish(flag);
      ptx::count_up(p.units + 1);
    }
  }
}

// ---- the warp that fetches operands waits for units ----

// Waits until the tile's operands are decoded for at least one stage from byte `k` on. Returns the byte of k up to
// which they may be fetched; INT_MAX: all. All lanes of a warp call it; each checks the flag of one unit: one of the
// next eight along k, in one of the four panels that a thread block reads.
__device__ __forceinline__ int wait_for_units(const NativeArgs& p, const Table& table, const Tile& t, int k, int rank,
                                              bool& all_ready) {
  if (all_ready) return INT_MAX;
  if (__any_sync(kAllLanes, ptx::counted(p.units + 1) == static_cast<uint32_t>(units_of(p, table)))) {
    all_ready = true;
    ptx::engine_sees_memory();
    return INT_MAX;
  }
  const int unit = kDecodedK * p.element_bytes, lane = threadIdx.x % 32, operand = lane / 8;
  const int at = k / unit + lane % 8, rows = t.below ? kDecodedTile.m : kDecodedTile.m / 2;
  const int row = t.row + (t.below ? 0 : rank * rows), col = t.col + (t.below ? rank * kDecodedOuter : 0);
  const bool of_b = operand >= 2;
  int panel = of_b ? col / kDecodedOuter + operand % 2 : (row + (operand % 2 ? rows - 1 : 0)) / kDecodedOuter;
  if (of_b && t.below) panel = col / kDecodedOuter;  // both lanes' panels are the same one
  if (!of_b) panel = min(panel, (t.row_end - 1) / kDecodedOuter);
  const bool needed = at * unit < t.k_end && panel < p.decoded[of_b].panels;
  const uint32_t* flag = flag_of(p, of_b, p.depth ? 0 : t.group, panel, at);
  bool ready = !needed;
  for (;;) {
    ready = ready || ptx::published(flag);
    uint32_t all = __ballot_sync(kAllLanes, ready);
    all &= all >> 16;
    all &= all >> 8;
    const int units = __ffs(~(all & 0xff)) - 1, until = (k / unit + units) * unit;
    if (until >= t.k_end || until - k >= kNativeTileK) {
      ptx::engine_sees_memory();
      return until >= t.k_end ? INT_MAX : k + (until - k) / kNativeTileK * kNativeTileK;
    }
  }
}

}  // namespace diptych::cuda
