// Defines the XLA FFI handlers of an op, one for each platform. A handler reads its buffers and attributes into the
// core's argument struct, in an overload of `run(Call&, const Attributes&)` in the op's file, and calls the op. It
// allocates nothing, does not synchronize and computes nothing itself.
#pragma once

#include "call.h"

namespace diptych::xla_ffi {

// Returns operands and results one after the other. An absent one returns an absent view and uses no buffer.
class Buffers {
 public:
  explicit Buffers(Call& call) : call_(call) {}
  TensorView in(int32_t there = 1) { return there != 0 ? call_.in(in_++) : TensorView{}; }
  TensorView out(int32_t there = 1) { return there != 0 ? call_.out(out_++) : TensorView{}; }

 private:
  Call& call_;
  int in_ = 0, out_ = 0;
};

// XLA may pass a payload or scale of one byte as uint8; it then gets its own dtype.
inline TensorView typed(TensorView v, DType dtype) {
  if (v.dtype == DType::u8 && bytes(dtype) == 1) v.dtype = dtype;
  return v;
}

inline QuantizedView copy(int32_t format, bool columnwise, const TensorView& data, const TensorView& scale_inv,
                          const TensorView& amax = {}) {
  const auto id = static_cast<FormatId>(format);
  if (!valid(id)) return {id, columnwise, data, scale_inv, amax};  // the core refuses it by name
  return {id, columnwise, typed(data, row(id).data()), typed(scale_inv, row(id).scale), amax};
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
