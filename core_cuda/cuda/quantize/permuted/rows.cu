// Rowwise copies of permuted rows in one pass: each token's row is read and encoded once, and written with its scales
// to its destinations. The same launch writes absent rows. For block formats of the usual types pieces.cu is used.
#include <algorithm>

#include "cuda/base/amax.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/quantize/permuted/rows.cuh"
#include "cuda/source/elements.cuh"

namespace diptych::cuda {
namespace {

constexpr int kUnroll = 4;  // groups of eight elements that a thread holds at once

// Thread blocks that an SM should hold: as many as registers allow without spilling. Chips that encode in software need
// more registers.
template <typename In>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int kResident = 3;
#else
constexpr int kResident = std::is_void_v<In> ? 5 : 8;
#endif

// Loads eight elements of a token's row at `col`, zeros outside.
template <typename In>
__device__ __forceinline__ Raw8<In> load_part(const RowParams& p, int64_t token, int64_t col) {
  const int64_t left = p.k - col;
  return load_raw8<In>(p.x, token * p.k + col, left < 8 ? static_cast<int>(left) : 8, p.vec_x && left > 0);
}

template <typename In>
struct Piece {
  Raw8<In> v[kUnroll];

  __device__ __forceinline__ void load(const RowParams& p, int64_t token, int64_t first, int step) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = load_part<In>(p, token, first + u * step);
  }
};

template <bool kE5M2, typename Raw>
__device__ __forceinline__ uint2 encode8(const Raw& v, float scale) {
  float y[8];
  const Floats8 f = as_floats(v);
#pragma unroll
  for (int j = 0; j < 8; ++j) y[j] = multiply_rn(f.v[j], scale);
  return {encode4<kE5M2>(y[0], y[1], y[2], y[3]), encode4<kE5M2>(y[4], y[5], y[6], y[7])};
}

// Returns the multiplier of eight neighbours. The first lane of their block writes the stored scale to *scale.
template <Blocks kBlocks, typename Raw, typename Stored>
__device__ __forceinline__ float block_scale(const RowParams& p, const Raw& v, Stored* scale) {
  constexpr int kLanes = kWidth<kBlocks> / 8;
  float m = max_abs(0.0f, v);
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, mask));
  const bool stores = threadIdx.x % kLanes == 0;
  if constexpr (kBlocks == Blocks::mx) {
    const uint32_t code = e8m0_from_amax(m, p.max_reciprocal);
    if (stores) *scale = static_cast<Stored>(code);
    return e8m0_reciprocal(code);
  } else {
    const float s = scale_from_amax(p.rule, m);
    if (stores) *scale = reciprocal_rn(s);
    return s;
  }
}

// Stores the scales of `count` blocks from `first` on to a row. One warp calls it.
template <typename Stored>
__device__ __forceinline__ void store_scales(const RowParams& p, int64_t row, int64_t first, int count,
                                             const Stored* from) {
  const int lane = threadIdx.x % 32;
  Stored* to = static_cast<Stored*>(p.scale) + row * p.blocks + first;
  if constexpr (sizeof(Stored) == 1) {
    if (p.words) {
      for (int i = lane * 4; i < count; i += 128)
        *reinterpret_cast<uint32_t*>(to + i) = *reinterpret_cast<const uint32_t*>(from + i);
      return;
    }
  }
  for (int i = lane; i < count; i += 32) to[i] = from[i];
}

template <typename In, bool kE5M2, Blocks kBlocks, int kGroup>
__global__ void __launch_bounds__(kBlock, kResident<In>) permuted_rows_kernel(const __grid_constant__ RowParams p) {
  using Group = TokenGroup<kGroup>;
  using Stored = std::conditional_t<kBlocks == Blocks::mx, uint8_t, float>;
  constexpr int kStep = kGroup * 8, kPiece = kStep * kUnroll, kScales = kPiece / kWidth<kBlocks>;
  DIPTYCH_DYNAMIC_SHARED(raw);
  __shared__ int counts[kBlock / 32];
  // Scales of two pieces in turn, so that one barrier separates writing from reading them.
  __shared__ __align__(16) Stored scales[kBlocks == Blocks::tensor ? 1 : Group::kTokens * 2 * kScales];
  const int64_t token = Group::token();
  const int lane = Group::lane();
  const unsigned absent = p.absent.mask();
  const bool there = token < p.tokens;
  Piece<In> piece;  // loads while the destinations are listed
  if (there) piece.load(p, token, lane * 8, kStep);

  float tensor_scale = 1.0f, m = 0.0f;
  if constexpr (kBlocks == Blocks::tensor) {
    tensor_scale = p.from.scale ? *p.from.scale : scale_from_amax(p.rule, *p.from.amax);
    if (blockIdx.x == 0 && threadIdx.x == 0) *static_cast<float*>(p.scale) = reciprocal_rn(tensor_scale);
  }
  int* list = reinterpret_cast<int*>(raw) + Group::index() * p.slots;
  int kept = 0;
  if (there) {
    kept = Group::collect(
        p.row_id_map + token * p.slots, p.slots, p.absent.rows,
        [&](int position, int, int row) { list[position] = row; }, [](int) {});
  }
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = kept;
  Group::sync();
  const int* count = counts + Group::index() * Group::kWarps;
  int rows = 0;
#pragma unroll
  for (int w = 0; w < Group::kWarps; ++w) rows += count[w];
  // Calls f(number, row) for each destination.
  const auto each = [&](auto&& f) {
    int number = 0;
#pragma unroll
    for (int w = 0; w < Group::kWarps; ++w) {
      for (int i = 0; i < count[w]; ++i) f(number++, list[w * Group::span(p.slots) + i]);
    }
  };

  int turn = 0;
  for (int64_t first = 0; rows > 0 && first < p.k; first += kPiece, turn ^= 1) {
    const int64_t col = first + lane * 8;
    if (first > 0) piece.load(p, token, col, kStep);
    Stored* own = scales + (kBlocks == Blocks::tensor ? 0 : (Group::index() * 2 + turn) * kScales);
    uint2 bytes[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      piece.v[u] = without_inf(piece.v[u]);
      float scale = tensor_scale;
      if constexpr (kBlocks == Blocks::tensor) {
        if (p.from.join) m = max_abs(m, piece.v[u]);
      } else {
        scale = block_scale<kBlocks>(p, piece.v[u], own + (u * kStep + lane * 8) / kWidth<kBlocks>);
      }
      bytes[u] = encode8<kE5M2>(piece.v[u], scale);
    }
    if constexpr (kBlocks != Blocks::tensor) Group::sync();
    each([&](int number, int row) {
      uint8_t* to = p.out + row * p.k + col;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (p.vec_out) {
          if (col + u * kStep < p.k) __stcs(reinterpret_cast<uint2*>(to + u * kStep), bytes[u]);
        } else {
          store_row8(p.out, p.absent.rows, p.k, row, col + u * kStep, false, bytes[u]);
        }
      }
      if constexpr (kBlocks != Blocks::tensor) {
        if (number % Group::kWarps != Group::warp()) return;
        const int64_t block = first / kWidth<kBlocks>, left = p.blocks - block;
        store_scales(p, row, block, left < kScales ? static_cast<int>(left) : kScales, own);
      }
    });
  }

  RowBytes zeros = p.zeros;
  if constexpr (kBlocks == Blocks::tensor) {  // 0 times an infinite scale is NaN
    zeros.fill = encode<kE5M2>(multiply_rn(0.0f, tensor_scale)) * 0x01010101u;
  }
  for (unsigned rest = absent; rest != 0; rest &= rest - 1) {
    const int64_t row = p.absent.row(__ffs(rest) - 1);
    fill_row(zeros, row);
    if constexpr (kBlocks != Blocks::tensor) {
      Stored* to = static_cast<Stored*>(p.scale) + row * p.blocks;
      Stored none;
      if constexpr (kBlocks == Blocks::mx) {
        none = static_cast<Stored>(e8m0_from_amax(0.0f, p.max_reciprocal));
      } else {
        none = reciprocal_rn(scale_from_amax(p.rule, 0.0f));
      }
      for (int64_t i = threadIdx.x; i < p.blocks; i += kBlock) to[i] = none;
    }
  }
  if constexpr (kBlocks == Blocks::tensor) {
    __shared__ float scratch[kBlock / 32];
    if (p.from.join) join_amax<kBlock>(m, scratch, p.from.join);
  }
}

// Computes the largest magnitude of the rows that have a destination; each is read once. A warp takes a token's row.
template <typename In>
__global__ void __launch_bounds__(kBlock, 6) permuted_amax_kernel(const __grid_constant__ RowParams p) {
  constexpr int kStep = 32 * 8, kWarps = kBlock / 32;
  const int lane = threadIdx.x % 32;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarps;
  float m = 0.0f;
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; token < p.tokens;
       token += stride) {
    Piece<In> piece;
    piece.load(p, token, lane * 8, kStep);
    bool moves = false;
    for (int s = lane; s < p.slots; s += 32) {
      moves |= static_cast<unsigned>(__ldg(p.row_id_map + token * p.slots + s)) < static_cast<unsigned>(p.absent.rows);
    }
    if (!__any_sync(kAllLanes, moves)) continue;
    for (int64_t first = 0; first < p.k; first += kStep * kUnroll) {
      if (first > 0) piece.load(p, token, first + lane * 8, kStep);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) m = max_abs(m, without_inf(piece.v[u]));
    }
  }
  __shared__ float scratch[2][kWarps];
  if (p.amax) join_amax<kBlock>(m, scratch[0], p.amax);
  if (p.also) join_amax<kBlock>(m, scratch[1], p.also);
}

RowParams row_params(const TensorView& x, const Source& s) {
  RowParams p{};
  p.x = Elements(x), p.tokens = x.rows(), p.k = x.cols();
  p.row_id_map = s.row_id_map.as<const int>(), p.slots = static_cast<int>(s.row_id_map.cols());
  p.absent.row_source = s.row_source.as<const int>(), p.absent.rows = static_cast<int>(s.row_source.numel());
  p.vec_x = aligned(x.data, 16) && p.k % 8 == 0;
  return p;
}

// Calls f with the type if rows are whole vectors of 16-bit elements, else with void: the type is then found at run
// time.
template <typename F>
Status with_usual_type(const RowParams& p, bool whole, F&& f) {
  if (p.vec_x && whole && p.x.type == DType::bf16) return f(std::type_identity<__nv_bfloat16>{});
  if (p.vec_x && whole && p.x.type == DType::f16) return f(std::type_identity<__half>{});
  return f(std::type_identity<void>{});
}

template <typename In, bool kE5M2, Blocks kBlocks, int kGroup>
Status run_group(RowParams& p, const Execution& exec) {
  constexpr int kTokens = TokenGroup<kGroup>::kTokens;
  const int64_t tokens = p.slots > 0 && p.k > 0 ? p.tokens : 0;  // with nothing to move, tokens may be any number
  const int64_t blocks = std::max<int64_t>(1, blocks_for(tokens, p.absent.rows, kTokens, &p.absent.each));
  return launch("quantize", permuted_rows_kernel<In, kE5M2, kBlocks, kGroup>, blocks, kBlock,
                static_cast<size_t>(kTokens) * p.slots * sizeof(int), exec.stream, p);
}

template <Blocks kBlocks>
Status run(RowParams& p, DType element, const Execution& exec) {
  const bool whole = p.k * 2 >= kLongRow || p.slots > kWarpSlots;  // whether a block takes a token, else a warp
  const auto of_type = [&](auto in) {
    return with_element(element, "quantize", [&](auto e5m2) {
      using In = typename decltype(in)::type;
      if constexpr (std::is_void_v<In>) {
        if (!whole) return run_group<In, e5m2.value, kBlocks, 32>(p, exec);
      }
      return run_group<In, e5m2.value, kBlocks, kBlock>(p, exec);
    });
  };
  if constexpr (kBlocks == Blocks::tensor) {
    return with_usual_type(p, whole, of_type);
  } else {
    return row_pieces_fit(p) ? quantize_row_pieces(p, kBlocks, element, exec) : of_type(std::type_identity<void>{});
  }
}

}  // namespace

bool quantize_permuted_rows_fits(const QuantizeArgs& args) {
  const FormatRow& f = row(args.spec.format);
  if (args.source.kind != SourceKind::permuted || args.columnwise.given() || args.spec.has(kSquare)) return false;
  if (f.rule == ScaleRule::e8m0_ceil) return f.block_rows == 1 && f.block_cols == kWidth<Blocks::mx>;
  return f.rule == ScaleRule::divide && f.scale == DType::f32 &&
         (f.one_scale() || (f.block_rows == 1 && f.block_cols == kWidth<Blocks::vector>));
}

Status quantize_permuted_rows(const QuantizeArgs& args, const Execution& exec) {
  const FormatRow& f = row(args.spec.format);
  RowParams p = row_params(args.x, args.source);
  p.out = args.rowwise.data.as<uint8_t>(), p.scale = args.rowwise.scale_inv.data;
  p.zeros = row_bytes(nullptr, p.out, p.k, 0);
  p.vec_out = aligned(p.out, 8) && p.k % 8 == 0, p.vec_out16 = aligned(p.out, 16) && p.k % 16 == 0;
  p.rule = divide_rule(args), p.max_reciprocal = 1.0f / row(f.element).max;
  if (f.one_scale()) {
    p.from = tensor_scale(args);
    return run<Blocks::tensor>(p, f.element, exec);
  }
  if (p.absent.rows == 0 || p.k == 0) return {};
  p.blocks = ceil_div(p.k, f.block_cols);
  p.words = aligned(p.scale, 4) && p.blocks % 4 == 0;
  return f.rule == ScaleRule::divide ? run<Blocks::vector>(p, f.element, exec) : run<Blocks::mx>(p, f.element, exec);
}

// The given outputs must hold 0.
Status permuted_amax(const AmaxArgs& args, const Execution& exec) {
  RowParams p = row_params(args.x, args.source);
  p.amax = args.out.as<float>(), p.also = args.columnwise_out.as<float>();
  const int64_t wanted = std::max(1, device_info(exec.device.index).sm_count) * int64_t{16};
  const int64_t blocks = std::min(wanted, ceil_div(p.tokens, kBlock / 32));
  return with_usual_type(p, true, [&](auto in) {
    return launch("amax", permuted_amax_kernel<typename decltype(in)::type>, blocks, kBlock, 0, exec.stream, p);
  });
}

}  // namespace diptych::cuda
