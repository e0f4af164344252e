// The kernels that take stacks of tensors, or many tensors, beside those that take each tensor alone, for
// test_quantize_stack_simulated.py: the same bits, in fewer launches. And those that take plain tensors, called one by
// one.
#include <cstdio>

#include "cuda/quantize/many.cuh"
#include "cuda/quantize/mxfp8.cuh"
#include "cuda/quantize/tiles.cuh"
#include "cuda/source/column_sum.cuh"
#include "simulated.h"
#include "tensor.h"

extern "C" cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

namespace diptych {
Status quantize(const QuantizeArgs&, const Execution&) { std::abort(); }
}  // namespace diptych

namespace diptych::cuda {

DeviceInfo device_info(int) { return {90, 4, 228}; }
Status cuda_status(cudaError_t, const char*) { return {}; }

// What plain tensors do not reach.
bool streams(const TileArgs&) { return false; }
bool permuted_tiles_fit(const TileArgs&, Scaling) { return false; }
bool quantize_permuted_rows_fits(const QuantizeArgs&) { return false; }
bool permuted_mxfp8_fits(const MxArgs&) { return false; }
Status stream_tiles(const TileArgs&, DType, const Execution&) { std::abort(); }
Status permuted_tiles(const TileArgs&, Scaling, DType, const Execution&) { std::abort(); }
Status quantize_permuted_rows(const QuantizeArgs&, const Execution&) { std::abort(); }
Status permuted_mxfp8(const MxArgs&, DType, const Execution&) { std::abort(); }
Status source_amax(const AmaxArgs&, const Execution&) { std::abort(); }
Status permuted_amax(const AmaxArgs&, const Execution&) { std::abort(); }
// As the kernel table chooses for plain tensors.
Status quantize(const QuantizeArgs& args, const Execution& exec) {
  const FormatRow& f = row(args.spec.format);
  if (f.rule == ScaleRule::e8m0_ceil) return prepared<quantize_mxfp8>(args, exec);
  const bool stream = f.one_scale() && quantize_stream_fits(args);
  return stream ? prepared<quantize_stream>(args, exec) : prepared<quantize_tiles>(args, exec);
}
Status column_sums(const TensorView&, const Source&, const TensorView&, const TensorView&, const Execution&) {
  std::abort();
}

}  // namespace diptych::cuda

namespace {

using namespace diptych;

struct Case {
  int format;
  int64_t count, m, k;
  DType dtype;
  bool rowwise, columnwise, scaled, accumulate;
  int64_t shift;           // bytes of x beyond 16
  bool from_rows = false;  // the columnwise copies are made from rows

  std::string describe() const {
    char text[200];
    std::snprintf(text, sizeof(text), "%lld tensors %lldx%lld of %s as %s, copies %d%d%d, scales %d%d, at %lld",
                  static_cast<long long>(count), static_cast<long long>(m), static_cast<long long>(k), name(dtype),
                  row(FormatId{format}).name, rowwise, columnwise, from_rows, scaled, accumulate,
                  static_cast<long long>(shift));
    return text;
  }
};

Case draw(std::mt19937& chance) {
  const auto extent = [&] {
    return static_cast<int64_t>(chance() % 3 ? chance() % 300 + 1 : (chance() % 3 + 1) * 128);
  };
  int format;
  do {
    format = static_cast<int>(chance() % kFormatCount);
  } while (row(FormatId{format}).rule != ScaleRule::divide);
  Case c{
      format, chance() % 5 + 1, extent(), extent(), chance() % 2 ? DType::bf16 : DType::f32, true, true, false, false,
      0};
  if (const unsigned side = chance() % 3) c.rowwise = side == 1, c.columnwise = side == 2;
  c.scaled = row(FormatId{format}).one_scale() && chance() % 2, c.accumulate = c.scaled && chance() % 2;
  c.from_rows = row(FormatId{format}).block_rows == 1 && c.columnwise && chance() % 2;
  c.shift = chance() % 3 ? 0 : bytes(c.dtype);
  return c;
}

// 16-byte aligned, with bytes around it that nobody may write.
struct Buffer {
  std::vector<unsigned char> bytes;
  Buffer(int64_t n, unsigned char filled) : bytes(static_cast<size_t>(n) + 64, filled) {}
  void* data() { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(bytes.data()) + 31) / 16 * 16); }
};

TensorView view(void* data, DType dtype, std::vector<int64_t> shape) {
  TensorView v;
  v.data = data, v.dtype = dtype, v.rank = static_cast<int32_t>(shape.size()), v.device = {Backend::cuda, 0};
  std::copy(shape.begin(), shape.end(), v.shape);
  return v;
}

struct Outputs {
  std::vector<Buffer> buffers;
  QuantizeArgs args;

  Outputs(const Case& c, void* x, void* scale) {
    args.spec = {FormatId{c.format}, c.from_rows ? kPow2 | kFromRows : 0};
    const FormatRow& f = row(args.spec.format);
    const auto make = [&](DType dtype, std::vector<int64_t> shape, unsigned char filled = 0x5A) {
      int64_t n = diptych::bytes(dtype);
      for (const int64_t extent : shape) n *= extent;
      buffers.emplace_back(n, filled);
      return view(buffers.back().data(), dtype, shape);
    };
    const auto scales = [&](const FormatRow& of, int64_t outer, int64_t inner) {
      if (of.one_scale()) return make(DType::f32, {c.count});
      return make(DType::f32, {c.count, (outer + of.block_rows - 1) / of.block_rows, (inner + 127) / 128});
    };
    args.x = view(x, c.dtype, {c.count, c.m, c.k});
    if (c.rowwise)
      args.rowwise = {FormatId{c.format}, false, make(f.element, {c.count, c.m, c.k}), scales(f, c.m, c.k), {}};
    if (c.columnwise) {
      const FormatId format = copy_format(args.spec, true);
      args.columnwise = {format, true, make(f.element, {c.count, c.k, c.m}), scales(row(format), c.k, c.m), {}};
    }
    // A large amax that is not cleared would remain; a small one grows.
    if (f.one_scale()) args.amax = make(DType::f32, {c.count}, c.accumulate ? 0x3F : 0x7E);
    if (c.scaled) args.scale = view(scale, DType::f32, {c.count});
    if (c.accumulate) args.amax_mode = AmaxMode::accumulate;
  }
  bool operator==(const Outputs& o) const {
    return std::equal(buffers.begin(), buffers.end(), o.buffers.begin(),
                      [](const Buffer& a, const Buffer& b) { return a.bytes == b.bytes; });
  }
};

std::string compare(const Case& c, std::mt19937& chance) {
  Buffer x(c.count * c.m * c.k * bytes(c.dtype), 0);
  char* data = static_cast<char*>(x.data()) + c.shift;
  const int64_t size = c.m * c.k;
  for (int64_t i = 0; i < c.count * size; ++i) {
    float v = static_cast<float>(static_cast<int>(chance() % 2001) - 1000);
    // The largest stands at either end, where whoever reads past a tensor would find another's.
    if (i % size == 0 || i % size == size - 1) v *= static_cast<float>(10 + c.count - i / size);
    const __nv_bfloat16 half = __float2bfloat16_rn(v);
    std::memcpy(data + i * bytes(c.dtype), c.dtype == DType::f32 ? static_cast<const void*>(&v) : &half,
                bytes(c.dtype));
  }
  std::vector<float> scale(c.count);
  for (float& s : scale) s = static_cast<float>(chance() % 100 + 1) / 1000.0f;
  Outputs together(c, data, scale.data()), listed(c, data, scale.data()), alone(c, data, scale.data());
  const Execution exec{{Backend::cuda, 0}, nullptr};
  if (!cuda::quantize_stack_fits({together.args})) return "no kernel takes " + c.describe();
  const int before = simulated::runs;
  Status status = cuda::quantize_stack({together.args}, exec);
  const int launches = simulated::runs - before;
  for (int64_t g = 0; g < c.count && status.ok(); ++g) status = cuda::quantize(slice(alone.args, g), exec);
  if (!status.ok()) return status.message() + ": " + c.describe();
  if (launches > 2) return std::to_string(launches) + " launches of " + c.describe();
  if (!(together == alone)) return "other bytes than each alone: " + c.describe();
  QuantizeManyArgs many;
  for (int64_t g = 0; g < c.count; ++g) many.each.push_back(slice(listed.args, g));
  const int first = simulated::runs;
  if (!cuda::quantize_many_fits(many)) return "quantize_many takes no " + c.describe();
  if (status = cuda::quantize_many(many, exec); !status.ok()) return status.message() + ": " + c.describe();
  if (simulated::runs - first > 3) return std::to_string(simulated::runs - first) + " launches of many " + c.describe();
  return listed == alone ? "" : "quantize_many wrote other bytes than each alone: " + c.describe();
}

}  // namespace

// 0, or 1 and a message.
extern "C" int compare_stacks(int seed, int count, char* message, int size) {
  std::mt19937 chance(static_cast<unsigned>(seed));
  simulated::chance.seed(static_cast<unsigned>(seed));
  for (int i = 0; i < count; ++i) {
    const std::string what = compare(draw(chance), chance);
    std::snprintf(message, static_cast<size_t>(size), "%s", what.c_str());
    if (!what.empty()) return 1;
  }
  return 0;
}

struct QuantizeCall {
  simulated::Tensor x, row, row_scale, col, col_scale, amax, scale;
  int32_t format, flags, amax_mode;
  float eps;
};

static QuantizeArgs args_of(const QuantizeCall& call) {
  using simulated::view;
  QuantizeArgs args;
  args.x = view(call.x), args.spec = {FormatId{call.format}, call.flags, call.eps};
  args.rowwise = {args.spec.format, false, view(call.row), view(call.row_scale), {}};
  args.columnwise = {copy_format(args.spec, true), true, view(call.col), view(call.col_scale), {}};
  args.amax_mode = AmaxMode{call.amax_mode}, args.amax = view(call.amax), args.scale = view(call.scale);
  return args;
}

// Plain tensors: `count` calls by quantize_many, or one call by quantize if `count` is 0. Returns the number of
// launches, or -1 and a message.
extern "C" int quantize(const QuantizeCall* calls, int count, char* message, int size) {
  const Execution exec{{Backend::cuda, 0}, nullptr};
  const int before = simulated::runs;
  QuantizeManyArgs many;
  for (int i = 0; i < std::max(count, 1); ++i) many.each.push_back(args_of(calls[i]));
  const bool together = count > 0 && cuda::quantize_many_fits(many);
  Status status = together ? cuda::quantize_many(many, exec) : Status();
  for (size_t i = 0; !together && i < many.each.size() && status.ok(); ++i) status = cuda::quantize(many.each[i], exec);
  std::snprintf(message, static_cast<size_t>(size), "%s", status.message().c_str());
  return status.ok() ? simulated::runs - before : -1;
}

// Of its rows, and of its Hadamard transform.
extern "C" int amax(const simulated::Tensor* x, const simulated::Tensor* rows, const simulated::Tensor* rotated) {
  using simulated::view;
  const AmaxArgs args{view(*x), view(*rows), view(*rotated), kRowAmax | kRht | kRhtSigns, {}};
  return cuda::amax(args, {{Backend::cuda, 0}, nullptr}).ok() ? 0 : 1;
}
