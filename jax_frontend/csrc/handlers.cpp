// The XLA FFI handlers: one per op and platform, each a thin reading of its buffers and attributes into the core's
// argument struct. Nothing here allocates, synchronizes or computes; scale arithmetic and its float mode are the
// core's.
#include "call.h"

namespace diptych::xla_ffi {
namespace {

// A payload or scale of one byte may come as the byte that it is.
TensorView typed(TensorView v, DType dtype) {
  if (v.dtype == DType::u8 && bytes(dtype) == 1) v.dtype = dtype;
  return v;
}

QuantizedView copy(int32_t format, bool columnwise, const TensorView& data, const TensorView& scale_inv) {
  const auto id = static_cast<FormatId>(format);
  if (!valid(id)) return {id, columnwise, data, scale_inv};  // the core names it
  return {id, columnwise, typed(data, row(id).element), typed(scale_inv, row(id).scale)};
}

// x -> amax
Status run(Call& call, const AmaxAttributes&) {
  return call.each([&] { return amax(AmaxArgs{call.in(0), call.out(0)}, call.exec()); });
}

// x, [amax] -> [rowwise data, scale_inv], [columnwise data, scale_inv], [amax: per-tensor formats, where none is given]
Status run(Call& call, const QuantizeAttributes& d) {
  return call.each([&] {
    QuantizeArgs a;
    int next = 0;
    a.x = call.in(0);
    a.spec = {static_cast<FormatId>(d.format), d.pow2 != 0, d.eps};
    for (QuantizedView* q : {&a.rowwise, &a.columnwise}) {
      const bool columnwise = q == &a.columnwise;
      if ((columnwise ? d.columnwise : d.rowwise) == 0) continue;
      *q = copy(d.format, columnwise, call.out(next), call.out(next + 1));
      next += 2;
    }
    a.amax_ready = d.amax_ready != 0;
    a.amax = a.amax_ready ? call.in(1) : call.out(next);
    return quantize(a, call.exec());
  });
}

// data, scale_inv -> out
Status run(Call& call, const DequantizeAttributes& d) {
  return call.each([&] {
    return dequantize(DequantizeArgs{copy(d.format, d.columnwise != 0, call.in(0), call.in(1)), call.out(0)},
                      call.exec());
  });
}

// a data, a scale_inv, b data, b scale_inv, [bias], [c] -> d, [workspace: CUDA]
Status run(Call& call, const GemmAttributes& d) {
  return call.each([&] {
    GemmArgs g;
    int next = 4;
    g.a = copy(d.a_format, d.a_columnwise != 0, call.in(0), call.in(1));
    g.b = copy(d.b_format, d.b_columnwise != 0, call.in(2), call.in(3));
    if (d.has_bias != 0) g.bias = call.in(next++);
    if (d.has_c != 0) g.c = call.in(next++);
    g.d = call.out(0);
    g.workspace = call.out(1);
    g.alpha = d.alpha;
    g.beta = d.beta;
    g.fast_accum = d.fast_accum != 0;
    return gemm(g, call.exec());
  });
}

// dy -> out, [workspace: CUDA]
Status run(Call& call, const BiasGradAttributes&) {
  return call.each([&] { return bias_grad(BiasGradArgs{call.in(0), call.out(0), call.out(1)}, call.exec()); });
}

template <typename Attributes>
ffi::Error handle(const Execution& exec, ffi::RemainingArgs args, ffi::RemainingRets rets, const Attributes& d) {
  Call call;
  Status status = call.open(d, args, rets, exec);
  if (status.ok()) status = run(call, d);
  return to_error(status);
}

template <typename Attributes>
ffi::Error on_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets, Attributes d) {
  return handle(Execution{}, args, rets, d);
}

// The stream arrives as the pointer that cudaStream_t is, so that the toolkit's headers are not needed here.
template <typename Attributes>
ffi::Error on_cuda(void* stream, int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets, Attributes d) {
  return handle(Execution{{Backend::cuda, device}, stream}, args, rets, d);
}

}  // namespace
}  // namespace diptych::xla_ffi

// Command buffers record these handlers into CUDA graphs: they enqueue kernels and nothing else.
#define DIPTYCH_HANDLERS(op, Attributes)                                                                       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                               \
      diptych_##op##_cpu, diptych::xla_ffi::on_cpu<diptych::xla_ffi::Attributes>,                              \
      xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<diptych::xla_ffi::Attributes>("attributes")); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(diptych_##op##_cuda, diptych::xla_ffi::on_cuda<diptych::xla_ffi::Attributes>,  \
                                xla::ffi::Ffi::Bind()                                                          \
                                    .Ctx<xla::ffi::PlatformStream<void*>>()                                    \
                                    .Ctx<xla::ffi::DeviceOrdinal>()                                            \
                                    .RemainingArgs()                                                           \
                                    .RemainingRets()                                                           \
                                    .Attr<diptych::xla_ffi::Attributes>("attributes"),                         \
                                {xla::ffi::Traits::kCmdBufferCompatible})

DIPTYCH_HANDLERS(amax, AmaxAttributes);
DIPTYCH_HANDLERS(quantize, QuantizeAttributes);
DIPTYCH_HANDLERS(dequantize, DequantizeAttributes);
DIPTYCH_HANDLERS(gemm, GemmAttributes);
DIPTYCH_HANDLERS(bias_grad, BiasGradAttributes);

// What this library was compiled with; read before anything is registered.
extern "C" const char* diptych_jax_headers() { return DIPTYCH_JAXLIB_VERSION; }
extern "C" int diptych_jax_ffi_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }
extern "C" int diptych_jax_attributes_version() { return diptych::xla_ffi::kAttributesVersion; }
