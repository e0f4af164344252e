// Formats with float32 scales: per tensor, 1x128 and 128x128 blocks. Makes rowwise and transposed copies from one read
// of the input.
//
// Geometry: tiles.cuh.
#include "cuda/base/launch.cuh"
#include "cuda/quantize/many.cuh"
#include "cuda/quantize/tiles.cuh"
#include "cuda/source/staged.cuh"

namespace diptych::cuda {
namespace {

// A thread's patch of the tile that is tile_m-th along m and tile_k-th along k.
struct Patch {
  int64_t tile_m, tile_k, row0, col0, row, col;
  int lane, warp, patch_row, patch_col;

  __device__ __forceinline__ Patch(int64_t tile_m, int64_t tile_k)
      : tile_m(tile_m),
        tile_k(tile_k),
        row0(tile_m * kTile),
        col0(tile_k * kTile),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        patch_row(warp * 2 + lane / 16),
        patch_col(lane % 16) {
    row = row0 + patch_row * 8, col = col0 + patch_col * 8;
  }
};

// Encodes a patch x. `first`: of the tensor's first thread block.
template <bool kE5M2, Scaling kScaling, typename T>
__device__ __forceinline__ void encode_patch(const TileArgs& p, const Patch& at, Row8<T> (&x)[8], bool first) {
  __shared__ __align__(16) uint8_t tile[kTile * kTile];
  __shared__ __align__(16) float amaxes[kScaling == Scaling::vector ? 1 : 2 * kWarps];
  // 1x128: the tile's memory is free until column scales are known.
  float* const scratch = kScaling == Scaling::vector ? reinterpret_cast<float*>(tile) : amaxes;
  __shared__ __align__(16) float column_scale[kScaling == Scaling::vector ? kTile : 1];
  const auto [tile_m, tile_k, row0, col0, row, col, lane, warp, patch_row, patch_col] = at;
  const int tid = threadIdx.x;

  uint2 q[8];
  // 1x128: returns the scale of row `row + lane % 8`, and stores its reciprocal.
  const auto row_scale = [&] {
    const auto row_amax = [&] {
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = max_abs(0.0f, x[i]);
      max_and_halve<4>(v, lane, 4), max_and_halve<2>(v, lane, 2), max_and_halve<1>(v, lane, 1);
      return fmaxf(v[0], __shfl_xor_sync(kAllLanes, v[0], 8));
    };
    float amax = row_amax();
    if (rarely(__any_sync(kAllLanes, amax == INFINITY))) drop_inf(x), amax = row_amax();
    const float scale = scale_from_amax(p.rule, amax);
    if (p.row && lane % 16 < 8 && row + lane % 8 < p.m) {
      p.row_scale[(row + lane % 8) * p.tiles_k + tile_k] = reciprocal_rn(scale);
    }
    return scale;
  };
  const bool whole = p.vec_row && row0 + kTile <= p.m && col0 + kTile <= p.k;
  if constexpr (kScaling == Scaling::vector) {
    if (p.row) {
      const float scale = row_scale();
      store_rows8<8>(p.row, p.m, p.k, row, col, p.vec_row, whole, [&](int i) {
        const float s = __shfl_sync(kAllLanes, scale, (lane & 16) | i);
        return encode_row8<kE5M2>(x[i], [&](int) { return s; });
      });
    }
    if (!p.col) return;
    float v[8], most = 0.0f;
    column_max_abs(x, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) most = fmaxf(most, v[j]);
    if (rarely(most == INFINITY)) drop_inf(x), column_max_abs(x, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = fmaxf(v[j], __shfl_xor_sync(kAllLanes, v[j], 16));
    if (lane < 16) {
      float4* s = reinterpret_cast<float4*>(scratch + warp * kTile + patch_col * 8);
      s[0] = make_float4(v[0], v[1], v[2], v[3]), s[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
    __syncthreads();
    if (tid < kTile) {
      float amax = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) amax = fmaxf(amax, scratch[w * kTile + tid]);
      const float scale = scale_from_amax(p.rule, amax);
      column_scale[tid] = scale;
      if (col0 + tid < p.k) p.col_scale[(col0 + tid) * p.tiles_m + tile_m] = reciprocal_rn(scale);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float s = column_scale[patch_col * 8 + j];
      float y[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = multiply_rn(x[i][j], s);
      q[j] = make_uint2(encode4<kE5M2>(y[0], y[1], y[2], y[3]), encode4<kE5M2>(y[4], y[5], y[6], y[7]));
    }
  } else if constexpr (kScaling == Scaling::from_rows) {
    const float scale = row_scale();
    uint32_t numbers = 0;  // bit i: row i of the patch has a finite element other than zero
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float s = __shfl_sync(kAllLanes, scale, (lane & 16) | i);
      q[i] = encode_row8<kE5M2>(x[i], [&](int) { return s; });
      numbers |= (any_number4<kE5M2>(q[i].x) || any_number4<kE5M2>(q[i].y) ? 1u : 0u) << i;
    }
    if (p.row) store_rows8<8>(p.row, p.m, p.k, row, col, p.vec_row, whole, [&](int i) { return q[i]; });
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2) numbers |= __shfl_xor_sync(kAllLanes, numbers, mask);
    // The block's scale is the smallest of the rows that have numbers, or if there are none, of all rows.
    const bool exists = row + lane % 8 < p.m, counts = exists && (numbers >> lane % 8 & 1);
    const float2 least = block_min(make_float2(counts ? scale : INFINITY, exists ? scale : INFINITY),
                                   reinterpret_cast<float2*>(scratch));
    const float top = least.x < INFINITY ? least.x : least.y;
    if (tid == 0) p.col_scale[tile_k * p.tiles_m + tile_m] = reciprocal_rn(top);
    // Scales are powers of two, and normal numbers; a shift by 2^-34 turns every element to zero.
    const int shift = static_cast<int>(bits_of(scale) >> 23) - static_cast<int>(bits_of(top) >> 23);
    const float factor = float_of(static_cast<uint32_t>(127 - min(max(shift, 0), 34)) << 23);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float by = __shfl_sync(kAllLanes, factor, (lane & 16) | i);
      if (by != 1.0f) q[i] = make_uint2(shifted4<kE5M2>(q[i].x, by), shifted4<kE5M2>(q[i].y, by));
    }
    transpose8x8(q);
  } else {
    float scale;
    const auto largest = [&] {
      float m = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) m = max_abs(m, x[i]);
      return m;
    };
    if constexpr (kScaling == Scaling::tensor) {
      drop_inf(x);
      scale = p.from.scale ? *p.from.scale : scale_from_amax(p.rule, *p.from.amax);
      if (first && tid == 0) {
        const float inverse = reciprocal_rn(scale);
        if (p.row_scale) *p.row_scale = inverse;  // an empty tensor may have no data, but has a scale
        if (p.col_scale) *p.col_scale = inverse;
      }
      if (p.from.join) join_amax<kThreads>(largest(), scratch, p.from.join);
    } else {
      float m = largest();
      if (rarely(m == INFINITY)) drop_inf(x), m = largest();
      scale = scale_from_amax(p.rule, block_max(m, scratch));
      if (tid == 0) {
        const float inverse = reciprocal_rn(scale);
        if (p.row) p.row_scale[tile_m * p.tiles_k + tile_k] = inverse;
        if (p.col) p.col_scale[tile_k * p.tiles_m + tile_m] = inverse;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      q[i] = encode_row8<kE5M2>(x[i], [&](int) { return scale; });
      if (p.row) store_row8(p.row, p.m, p.k, row + i, col, p.vec_row, q[i]);
    }
    if (!p.col) return;
    transpose8x8(q);  // one scale for both copies, so the columnwise bytes are the transposed rowwise bytes
  }

#pragma unroll
  for (int j = 0; j < 8; ++j) *reinterpret_cast<uint2*>(tile + unit_offset(patch_col * 8 + j, patch_row)) = q[j];
  __syncthreads();
  store_columns(p, tile, row0, col0, p.k);
}

// The work of block `block` of the `blocks` thread blocks of one tensor.
template <typename In, bool kE5M2, Scaling kScaling>
__device__ __forceinline__ void encode_tile(const TileArgs& p, unsigned block, unsigned blocks) {
  // Per tensor: last tiles first, because the amax pass has left them in L2.
  const unsigned index = kScaling == Scaling::tensor ? blocks - 1 - block : block;
  const Patch at(index / p.tiles_k, paired_tile<In>(p.in, index % p.tiles_k, p.tiles_k, kTile));
  Row8<Held<In>> x[8];
  fetch_rows<In>(p.in, at.row, at.col, x);
  encode_patch<kE5M2, kScaling>(p, at, x, block == 0);
}

// Thread blocks that an SM should hold; 0: as many as registers permit. Encoding in software takes more registers.
template <typename In, Scaling kScaling>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int kResident = kComputed<In> ? 2 : 0;
#else
constexpr int kResident = kComputed<In>                                    ? 2
                          : kScaling != Scaling::square && sizeof(In) == 2 ? 4
                                                                           : 0;
#endif

template <typename In, bool kE5M2, Scaling kScaling>
__global__ void __launch_bounds__(kThreads, kResident<In, kScaling>) tile_kernel(const __grid_constant__ TileArgs p) {
  encode_tile<In, kE5M2, kScaling>(p, blockIdx.x, gridDim.x);
}

// 1x128 blocks of an activation or its gradient: of that, a tile in each half.
template <typename In, bool kE5M2, Scaling kScaling>
__global__ void __launch_bounds__(kThreads, 2)
    staged_kernel(const __grid_constant__ TileArgs p, const __grid_constant__ Shares shares) {
  DIPTYCH_DYNAMIC_SHARED(memory);
  const unsigned wide = kTypedGrad<In> ? p.tiles_k / 2 : p.tiles_k;
  each_staged<In, kThreads>(
      p.in, memory, shares,
      [&](unsigned tile, auto&& f) {
        const Patch at(tile / wide, tile % wide);
        f(at.row, at.col);
      },
      [&](unsigned tile, unsigned half, auto& x) {
        encode_patch<kE5M2, kScaling>(p, Patch(tile / wide, tile % wide + half * wide), x, false);
      });
}

// The strides from one tensor of a stack to the next.
struct StackSteps {
  int64_t x_bytes, elements, row_scales, col_scales;
  unsigned blocks;  // for each tensor
};

template <typename T>
__device__ __forceinline__ T* stepped(T* p, int64_t n) {
  return p ? p + n : nullptr;
}

template <typename T, bool kE5M2, Scaling kScaling>
__global__ void __launch_bounds__(kThreads, kResident<T, kScaling>)
    stack_kernel(const __grid_constant__ TileArgs stack, const __grid_constant__ StackSteps step) {
  // Per tensor: last tensors first, like their tiles.
  const unsigned index = kScaling == Scaling::tensor ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const unsigned g = index / step.blocks, inside = index - g * step.blocks;
  TileArgs p = stack;
  p.in.x.data = static_cast<char*>(p.in.x.data) + g * step.x_bytes;
  p.row = stepped(p.row, g * step.elements), p.row_scale = stepped(p.row_scale, g * step.row_scales);
  p.col = stepped(p.col, g * step.elements), p.col_scale = stepped(p.col_scale, g * step.col_scales);
  p.from = {stepped(p.from.amax, g), stepped(p.from.scale, g), stepped(p.from.join, g)};
  encode_tile<T, kE5M2, kScaling>(p, kScaling == Scaling::tensor ? step.blocks - 1 - inside : inside, step.blocks);
}

// One of many tensors, without what they share.
struct ManyTile {
  void* x;
  uint8_t *row, *col;
  float *row_scale, *col_scale;
  TensorScale from;
  int64_t m, k;
  bool vec, vec_row, vec_col;

  __host__ __device__ unsigned tiles(int64_t extent) const {
    return static_cast<unsigned>((extent + kTile - 1) / kTile);
  }
  __host__ __device__ unsigned blocks() const { return tiles(m) * tiles(k); }
};

template <typename T, bool kE5M2, Scaling kScaling>
__global__ void __launch_bounds__(kThreads, kResident<T, kScaling>)
    many_kernel(const __grid_constant__ Table<ManyTile> many, const DivideRule rule) {
  // Per tensor: last tensors first, like their tiles.
  const unsigned index = kScaling == Scaling::tensor ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int which = tensor_of(many, index);
  const ManyTile& one = many.of[which];
  const unsigned inside = index - many.first[which], blocks = many.first[which + 1] - many.first[which];
  TileArgs p{};
  p.in.x.data = one.x, p.in.m = p.m = one.m, p.in.k = p.k = one.k, p.in.vec = one.vec;
  p.tiles_m = one.tiles(one.m), p.tiles_k = one.tiles(one.k), p.from = one.from, p.rule = rule;
  p.row = one.row, p.row_scale = one.row_scale, p.vec_row = one.vec_row;
  p.col = one.col, p.col_scale = one.col_scale, p.vec_col = one.vec_col;
  encode_tile<T, kE5M2, kScaling>(p, kScaling == Scaling::tensor ? blocks - 1 - inside : inside, blocks);
}

template <typename In, bool kE5M2>
Status run(const TileArgs& p, Scaling scaling, int64_t tiles, const Execution& exec) {
  void* stream = exec.stream;
  if constexpr (kTyped<In> && !kTypedNorm<In>) {
    const int64_t staged = kTypedGrad<In> ? tiles / 2 : tiles;
    if (scaling == Scaling::vector && stages<In>(p.in, kTile, exec)) {
      return launch_staged<In, staged_kernel<In, kE5M2, Scaling::vector>, kThreads>("quantize", staged, exec, p);
    }
    if (scaling == Scaling::from_rows && stages<In>(p.in, kTile, exec)) {
      return launch_staged<In, staged_kernel<In, kE5M2, Scaling::from_rows>, kThreads>("quantize", staged, exec, p);
    }
  }
  if (scaling == Scaling::from_rows) {
    return launch("quantize", tile_kernel<In, kE5M2, Scaling::from_rows>, tiles, kThreads, 0, stream, p);
  }
  if (scaling == Scaling::vector) {
    return launch("quantize", tile_kernel<In, kE5M2, Scaling::vector>, tiles, kThreads, 0, stream, p);
  }
  if constexpr (kTyped<In>) {  // one scale: stream_tiles runs instead; square blocks are for weights
    return run<Computed, kE5M2>(p, scaling, tiles, exec);
  } else if (scaling == Scaling::tensor) {
    return launch("quantize", tile_kernel<In, kE5M2, Scaling::tensor>, tiles, kThreads, 0, stream, p);
  } else {
    return launch("quantize", tile_kernel<In, kE5M2, Scaling::square>, tiles, kThreads, 0, stream, p);
  }
}

Scaling scaling_of(const QuantSpec& spec) {
  const FormatRow& f = row(spec.format);
  if (spec.has(kFromRows)) return Scaling::from_rows;
  return f.one_scale() ? Scaling::tensor : f.block_rows == 1 ? Scaling::vector : Scaling::square;
}

}  // namespace

TileArgs tile_args(const QuantizeArgs& args) {
  TileArgs p{};
  p.in = source_args(args.x, args.source), p.m = p.in.m, p.k = p.in.k, p.rule = divide_rule(args);
  p.tiles_m = static_cast<unsigned>(ceil_div(p.m, kTile)), p.tiles_k = static_cast<unsigned>(ceil_div(p.k, kTile));
  if (row(args.spec.format).one_scale()) p.from = tensor_scale(args);
  if (args.rowwise.given()) {
    p.row = args.rowwise.data.as<uint8_t>(), p.row_scale = args.rowwise.scale_inv.as<float>();
    p.vec_row = aligned(p.row, 8) && p.k % 8 == 0;
  }
  if (args.columnwise.given()) {
    p.col = args.columnwise.data.as<uint8_t>(), p.col_scale = args.columnwise.scale_inv.as<float>();
    p.vec_col = aligned(p.col, 16) && p.m % 16 == 0;
  }
  return p;
}

Status quantize_tiles(const QuantizeArgs& args, const Execution& exec) {
  const FormatRow& f = row(args.spec.format);
  const Scaling scaling = scaling_of(args.spec);
  TileArgs p = tile_args(args);
  if (p.tiles_m == 0 || p.tiles_k == 0) {
    if (scaling != Scaling::tensor) return {};
    p.tiles_m = p.tiles_k = 1;  // an empty tensor has no blocks, but a scale
  }
  if (scaling == Scaling::tensor && streams(p)) return stream_tiles(p, f.element, exec);
  if (permuted_tiles_fit(p, scaling)) return permuted_tiles(p, scaling, f.element, exec);
  return with_input_type(p.in, "quantize", [&](auto type) {
    return with_element(f.element, "quantize", [&](auto e5m2) {
      return run<decltype(type), e5m2.value>(p, scaling, int64_t{p.tiles_m} * p.tiles_k, exec);
    });
  });
}

Status quantize_tile_stack(const QuantizeArgs& stack, const Execution& exec) {
  const FormatRow& f = row(stack.spec.format);
  const Scaling scaling = scaling_of(stack.spec);
  const TileArgs p = tile_args(slice(stack, 0));
  StackSteps step{p.m * p.k * bytes(stack.x.dtype), p.m * p.k, 1, 1, p.tiles_m * p.tiles_k};
  if (scaling != Scaling::tensor) {
    step.row_scales = (scaling == Scaling::square ? p.tiles_m : p.m) * int64_t{p.tiles_k};
    step.col_scales = (scaling == Scaling::vector ? p.k : p.tiles_k) * int64_t{p.tiles_m};
  }
  const auto launch_one = [&](auto kernel) {
    return launch("quantize_stack", kernel, stack.x.shape[0] * step.blocks, kThreads, 0, exec.stream, p, step);
  };
  return with_float_type(stack.x.dtype, "quantize_stack", [&](auto type) {
    return with_element(f.element, "quantize_stack", [&](auto e5m2) {
      using T = decltype(type);
      if (scaling == Scaling::tensor) return launch_one(stack_kernel<T, e5m2.value, Scaling::tensor>);
      if (scaling == Scaling::from_rows) return launch_one(stack_kernel<T, e5m2.value, Scaling::from_rows>);
      return scaling == Scaling::vector ? launch_one(stack_kernel<T, e5m2.value, Scaling::vector>)
                                        : launch_one(stack_kernel<T, e5m2.value, Scaling::square>);
    });
  });
}

Status tile_many(std::span<const QuantizeArgs> calls, const Execution& exec) {
  const QuantizeArgs& first = calls.front();
  const FormatRow& f = row(first.spec.format);
  const Scaling scaling = scaling_of(first.spec);
  const auto describe = [](const QuantizeArgs& one) {
    const TileArgs p = tile_args(one);
    return ManyTile{p.in.x.data, p.row, p.col,    p.row_scale, p.col_scale, p.from,
                    p.m,         p.k,   p.in.vec, p.vec_row,   p.vec_col};
  };
  const auto run_one = [&](auto kernel) {
    return launch_many(
        "quantize_many", kernel, calls, kThreads, exec, describe,
        [](const ManyTile& one) { return int64_t{one.blocks()}; }, divide_rule(first));
  };
  return with_float_type(first.x.dtype, "quantize_many", [&](auto type) {
    return with_element(f.element, "quantize_many", [&](auto e5m2) {
      using T = decltype(type);
      if (scaling == Scaling::tensor) return run_one(many_kernel<T, e5m2.value, Scaling::tensor>);
      if (scaling == Scaling::from_rows) return run_one(many_kernel<T, e5m2.value, Scaling::from_rows>);
      return scaling == Scaling::vector ? run_one(many_kernel<T, e5m2.value, Scaling::vector>)
                                        : run_one(many_kernel<T, e5m2.value, Scaling::square>);
    });
  });
}

}  // namespace diptych::cuda
