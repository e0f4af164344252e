// dequantize: float32(q) * scale_inv, rounded once, then one cast; the output has the tensor's orientation. For NVFP4
// the scale is (float32(scale_inv) * amax) * float32(1 / 2688).
//
// A thread owns an 8 x 8 patch of the stored data. A warp's 32 patches are arranged 4 x 8 if the output has the data's
// orientation and 8 x 4 if it is the transpose, so that loads and stores move whole sectors.
#include "cuda/base/e2m1.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/vector.cuh"

namespace diptych::cuda {
namespace {

constexpr int kThreads = 256;

struct DequantizeKernelArgs {
  const uint8_t* q;   // [rows, cols] as stored; E2M1: [rows, cols / 2]
  const void* scale;  // per tensor, or [.., scale_cols] in the orientation of q
  const float* amax;  // E2M1: [1], or [rows] where amax_step is 1
  void* out;          // [rows, cols], or [cols, rows] if transposed
  int64_t amax_step;
  int64_t rows, cols, scale_cols;
  int64_t block_rows, block_cols;
  unsigned tiles, tiles_c;                        // warp tiles, and how many of them along the columns
  bool e8m0, by_row, transposed, vec_q, vec_out;  // by_row: each row of a patch has one scale; else each column
};

template <DType kElement>
__device__ __forceinline__ float load_scale(const DequantizeKernelArgs& p, int64_t row, int64_t col) {
  if (row >= p.rows || col >= p.cols) return 0.0f;
  const int64_t i = row / p.block_rows * p.scale_cols + col / p.block_cols;
  if constexpr (kElement == DType::e2m1) {  // E4M3 scale times the amax
    const float code = decode2<false>(static_cast<const uint8_t*>(p.scale)[i]).x;
    return multiply_rn(multiply_rn(code, p.amax[row * p.amax_step]), kPerAmax);
  } else {
    return p.e8m0 ? e8m0_to_float(static_cast<const uint8_t*>(p.scale)[i]) : static_cast<const float*>(p.scale)[i];
  }
}

// Returns elements col .. col + 7 of a stored row, a byte each; those that do not exist are 0.
template <DType kElement>
__device__ __forceinline__ uint2 load_codes(const DequantizeKernelArgs& p, int64_t row, int64_t col) {
  uint2 q = make_uint2(0, 0);
  if (row >= p.rows || col >= p.cols) return q;
  const int64_t at = row * p.cols + col;
  if constexpr (kElement == DType::e2m1) {
    const uint8_t* s = p.q + at / 2;  // cols is a multiple of 16
    uint32_t w = 0;
    if (p.vec_q) {
      w = __ldg(reinterpret_cast<const uint32_t*>(s));
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) w |= static_cast<uint32_t>(s[j]) << (j * 8);
    }
    const uint32_t even = w & 0x0f0f0f0f, odd = (w >> 4) & 0x0f0f0f0f;
    q = make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
  } else if (p.vec_q) {
    q = __ldg(reinterpret_cast<const uint2*>(p.q + at));
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (col + j < p.cols) (j < 4 ? q.x : q.y) |= static_cast<uint32_t>(p.q[at + j]) << (j % 4 * 8);
    }
  }
  return q;
}

// Decodes the two codes in the low bytes of `two`.
template <DType kElement>
__device__ __forceinline__ float2 decode_codes(uint32_t two) {
  if constexpr (kElement == DType::e2m1) {
    return make_float2(e2m1_decode(two & 0xf), e2m1_decode(two >> 8 & 0xf));
  } else {
    return decode2<kElement == DType::e5m2>(two & 0xffff);
  }
}

// Stores y[0..7] to out [rows, cols] at (row, col), where columns exist.
template <typename T>
__device__ __forceinline__ void store_floats(T* out, int64_t rows, int64_t cols, int64_t row, int64_t col, bool vec,
                                             const float (&y)[8]) {
  if (row >= rows || col >= cols) return;
  T* p = out + row * cols + col;
  if (vec) {
    if constexpr (sizeof(T) == 4) {
      reinterpret_cast<float4*>(p)[0] = make_float4(y[0], y[1], y[2], y[3]);
      reinterpret_cast<float4*>(p)[1] = make_float4(y[4], y[5], y[6], y[7]);
    } else {
      *reinterpret_cast<uint4*>(p) =
          make_uint4(pack2<T>(y[0], y[1]), pack2<T>(y[2], y[3]), pack2<T>(y[4], y[5]), pack2<T>(y[6], y[7]));
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (col + j < cols) p[j] = from_float<T>(y[j]);
  }
}

template <typename T, DType kElement>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(DequantizeKernelArgs p) {
  const int lane = threadIdx.x % 32;
  const unsigned tile = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (tile >= p.tiles) return;
  const int64_t tile_r = tile / p.tiles_c, tile_c = tile % p.tiles_c;
  const int64_t row = p.transposed ? tile_r * 64 + lane % 8 * 8 : tile_r * 32 + lane / 8 * 8;
  const int64_t col = p.transposed ? tile_c * 32 + lane / 8 * 8 : tile_c * 64 + lane % 8 * 8;

  uint2 q[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) q[i] = load_codes<kElement>(p, row + i, col);
  float scale[8];  // scales of the patch's stored rows or stored columns
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    scale[i] = p.by_row ? load_scale<kElement>(p, row + i, col) : load_scale<kElement>(p, row, col + i);
  }

  if (p.transposed) transpose8x8(q);
  const bool own = p.by_row == p.transposed;  // the scale changes along an output row
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float y[8];
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float2 f = decode_codes<kElement>((j < 4 ? q[i].x : q[i].y) >> (j % 4 * 8));
      y[j] = multiply_rn(f.x, own ? scale[j] : scale[i]);
      y[j + 1] = multiply_rn(f.y, own ? scale[j + 1] : scale[i]);
    }
    T* out = static_cast<T*>(p.out);
    if (p.transposed) {
      store_floats(out, p.cols, p.rows, col + i, row, p.vec_out, y);
    } else {
      store_floats(out, p.rows, p.cols, row + i, col, p.vec_out, y);
    }
  }
}

// Calls f with a std::integral_constant of the element type.
template <typename F>
Status with_code_type(DType d, F&& f) {
  if (d == DType::e2m1) return f(std::integral_constant<DType, DType::e2m1>{});
  return with_element(d, "dequantize", [&](auto e5m2) {
    return f(std::integral_constant<DType, e5m2.value ? DType::e5m2 : DType::e4m3>{});
  });
}

}  // namespace

Status dequantize(const DequantizeArgs& args, const Execution& exec) {
  const FormatRow& f = row(args.q.format);
  const int64_t m = args.out.rows(), k = args.out.cols();
  const bool columnwise = args.q.columnwise;
  DequantizeKernelArgs p{};
  p.transposed = columnwise && f.columnwise == ColumnwiseLayout::transposed;
  p.q = args.q.data.as<const uint8_t>(), p.scale = args.q.scale_inv.data, p.out = args.out.data;
  p.rows = p.transposed ? k : m, p.cols = p.transposed ? m : k;
  if (p.rows == 0 || p.cols == 0) return {};
  const bool two_level = f.rule == ScaleRule::two_level;
  const bool known =
      f.element == DType::e2m1 ? two_level && f.scale == DType::e4m3 : f.scale == DType::f32 || f.scale == DType::e8m0;
  if (!known) {
    return {Code::unsupported, std::string("dequantize: no CUDA kernel for scales of type ") + name(f.scale)};
  }
  p.e8m0 = f.scale == DType::e8m0;
  if (two_level) p.amax = args.q.amax.as<const float>(), p.amax_step = args.q.amax.numel() == 1 ? 0 : 1;
  const bool turned = columnwise && !p.transposed;  // blocks run down the tensor's rows
  const Block block = f.block(turned);
  p.block_rows = block.rows ? block.rows : p.rows;
  p.block_cols = block.cols ? block.cols : p.cols;
  p.scale_cols = block_count(p.cols, block.cols);
  p.by_row = block.cols % 8 == 0;
  if (!p.by_row && p.block_rows % 8 != 0) {
    return {Code::unsupported, std::string("dequantize: no CUDA kernel for the blocks of format ") + f.name};
  }
  const int64_t tiles_c = ceil_div(p.cols, p.transposed ? 32 : 64);
  const int64_t tiles = ceil_div(p.rows, p.transposed ? 64 : 32) * tiles_c;
  if (tiles > 0x7fffffff) return {Code::unsupported, "dequantize: the tensor has more than 2^31 tiles of 32 x 64"};
  p.tiles = static_cast<unsigned>(tiles), p.tiles_c = static_cast<unsigned>(tiles_c);
  p.vec_q = aligned(p.q, 8 / f.pack()) && p.cols % 8 == 0;
  p.vec_out = aligned(p.out, 16) && k % 8 == 0;
  return with_float_type(args.out.dtype, "dequantize", [&](auto type) {
    return with_code_type(f.element, [&](auto element) {
      return launch("dequantize", dequantize_kernel<decltype(type), element.value>, ceil_div(tiles, kThreads / 32),
                    kThreads, 0, exec.stream, p);
    });
  });
}

}  // namespace diptych::cuda
