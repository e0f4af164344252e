// Values of an activation or its gradient for kernels in which a thread encodes patches of eight rows and eight
// columns, one after the other. Operands wait in shared memory, where they take no registers: those of the next patch
// arrive while one is encoded. Of a gate's gradient a thread has a patch in each half, from one read and one sigmoid;
// the second half's values wait where their operands were.
#pragma once

#include <algorithm>

#include "cuda/base/launch.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/source/source.cuh"

namespace diptych::cuda {

constexpr int kStagedSharedKiB = 228;  // an SM's shared memory that two thread blocks fit into

// Returns whether tiles of `width` columns are staged: an SM must hold two thread blocks, and each half of a gradient
// must consist of whole tiles.
template <typename In>
bool stages(const SourceArgs& p, int width, const Execution& exec) {
  if (kTypedGrad<In> && (!p.gated || p.f % width != 0)) return false;
  return device_info(exec.device.index).shared_kib >= kStagedSharedKiB;
}

// A thread's operands. Its threads pass one address.
template <typename In, int kThreads>
class Staged {
  static constexpr bool kGrad = kTypedGrad<In>;
  static constexpr int kOperands = kGrad ? 3 : 2;  // x, the gate, dy
  using T = typename In::Element;
  static_assert(sizeof(T) == 2);

 public:
  static constexpr int kBytes = kThreads * 8 * kOperands * 16;

  __device__ __forceinline__ Staged(const SourceArgs& p, void* memory)
      : p_(p), at_(static_cast<uint4*>(memory) + threadIdx.x) {}

  // Sets the first row and column of the patch that `load` loads.
  __device__ __forceinline__ void aim(int64_t row, int64_t col) {
    left_ = col < p_.f ? static_cast<int>(max(int64_t{0}, min(p_.m - row, int64_t{8}))) : 0;
    x_ = static_cast<const T*>(p_.x.data) + (left_ > 0 ? row * p_.cols + col : 0);
    if (kGrad) dy_ = static_cast<const T*>(p_.dy.data) + (left_ > 0 ? row * p_.f + col : 0);
  }
  // Starts to load row i; rows and columns outside are 0.
  __device__ __forceinline__ void load(int i) {
    const bool inside = i < left_;
    const T* x = x_ + (inside ? i * p_.cols : 0);
    ptx::copy_async16(slot(i, 0), x, inside);
    if (p_.gated) ptx::copy_async16(slot(i, 1), x + p_.f, inside);
    if (kGrad) ptx::copy_async16(slot(i, 2), dy_ + (inside ? i * p_.f : 0), inside);
  }
  __device__ __forceinline__ Row8<T> operand(int i, int which) const {
    const uint4 u = *slot(i, which);
    Row8<T> r;
    r.v[0].w[0] = u.x, r.v[0].w[1] = u.y, r.v[0].w[2] = u.z, r.v[0].w[3] = u.w;
    return r;
  }

  // Keeps values in the place of row i's operands.
  __device__ __forceinline__ void put(int i, const Row8<float>& f) {
#pragma unroll
    for (int h = 0; h < 2; ++h) *slot(i, h) = make_uint4(f.v[h].w[0], f.v[h].w[1], f.v[h].w[2], f.v[h].w[3]);
  }
  __device__ __forceinline__ Row8<float> take(int i) const {
    Row8<float> f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 u = *slot(i, h);
      f.v[h].w[0] = u.x, f.v[h].w[1] = u.y, f.v[h].w[2] = u.z, f.v[h].w[3] = u.w;
    }
    return f;
  }

 private:
  __device__ __forceinline__ uint4* slot(int i, int which) const { return at_ + (i * kOperands + which) * kThreads; }

  const SourceArgs& p_;
  uint4* at_;
  int left_ = 0;
  const T *x_ = nullptr, *dy_ = nullptr;
};

// How thread blocks share tiles: those that start first, as many as run at once, have most of the tiles; the others,
// which start when these end, have one each, since some SMs are faster than others.
struct Shares {
  unsigned tiles, first_blocks, first_tiles;

  Shares(int64_t tiles, int64_t at_once) : tiles(static_cast<unsigned>(tiles)) {
    const int64_t each = tiles / at_once * 7 / 8;
    first_blocks = static_cast<unsigned>(each > 0 ? at_once : 0), first_tiles = static_cast<unsigned>(each * at_once);
  }
  int64_t blocks() const { return int64_t{first_blocks} + tiles - first_tiles; }
};

// Calls encode(tile, half, x) for a thread's patches x of the thread block's tiles; place(tile, f) calls f with the
// patch's first row and column, in a gradient's first half. Between two calls there is a barrier, so that one tile's
// shared memory is not the next one's, and warps run the same instructions, which must be fetched, at about one time.
template <typename In, int kThreads, typename Place, typename Encode>
__device__ __forceinline__ void each_staged(const SourceArgs& p, void* memory, const Shares& shares, Place&& place,
                                            Encode&& encode) {
  constexpr bool kGrad = kTypedGrad<In>;
  const bool one = blockIdx.x >= shares.first_blocks;
  const unsigned step = shares.first_blocks, tiles = one ? shares.tiles : shares.first_tiles;
  unsigned tile = one ? shares.first_tiles + blockIdx.x - shares.first_blocks : blockIdx.x;
  Staged<In, kThreads> staged(p, memory);
  const auto aim = [&](int64_t row, int64_t col) { staged.aim(row, col); };
  place(tile, aim);
#pragma unroll
  for (int i = 0; i < 8; ++i) staged.load(i);
  for (bool more = true; more; tile += step) {
    more = !one && tile + step < tiles;
    if (more) place(tile + step, aim);
    Row8<float> x[8];
    const auto compute = [&](const auto& reader) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        typename std::remove_cvref_t<decltype(reader)>::Raw raw;
        raw.a = staged.operand(i, 0), raw.b = staged.operand(i, 1);
        if constexpr (kGrad) {
          raw.d = staged.operand(i, 2);
          Floats8 y[2];
          reader.both(raw, y);
          x[i] = as_row(y[0]), staged.put(i, as_row(y[1]));
        } else {
          x[i] = reader.row(i, raw);
          if (more) staged.load(i);
        }
      }
    };
    ptx::copy_async_wait();
    if (usual<In>(p)) {
      compute(Reader<In, true, true>(p, 0, 0));
    } else {
      compute(Reader<In, true>(p, 0, 0));
    }
    if constexpr (!kGrad) {
      __syncthreads();
      encode(tile, 0, x);
    } else {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        if (half == 1) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            x[i] = staged.take(i);
            if (more) staged.load(i);
          }
        }
        __syncthreads();
        encode(tile, half, x);
      }
    }
  }
}

// Launches a kernel that calls each_staged, with two thread blocks on an SM.
template <typename In, auto kKernel, int kThreads, typename Args>
Status launch_staged(const char* name, int64_t tiles, const Execution& exec, const Args& args) {
  static SharedGrant grant;
  constexpr int kBytes = Staged<In, kThreads>::kBytes;
  DIPTYCH_TRY(grant.raise(kKernel, exec.device.index, kBytes));
  const Shares shares(tiles, 2 * int64_t{std::max(1, device_info(exec.device.index).sm_count)});
  return launch(name, kKernel, shares.blocks(), kThreads, kBytes, exec.stream, args, shares);
}

}  // namespace diptych::cuda
