// The attribute struct of each op, field for field what diptych/jax/ffi.py builds. XLA decodes them strictly by name,
// number and type; `version` says that both sides mean the same by them.
#pragma once

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace diptych::xla_ffi {

inline constexpr int32_t kAttributesVersion = 1;

// `batch_rank` axes of vmap lie in front of every result, the outermost first. `axes` holds 8 bits per operand, in
// operand order: bit 0 says that the operand has the innermost axis, bit 1 the next one. It has those axes in front.
// Results past `kBatchedResults` are workspaces, which all batch elements share.
struct AmaxAttributes {
  static constexpr int kBatchedResults = 1;
  int32_t version, batch_rank;
  int64_t axes;
};

struct QuantizeAttributes {
  static constexpr int kBatchedResults = 5;
  int32_t version, batch_rank;
  int64_t axes;
  int32_t format, pow2;
  float eps;
  int32_t amax_ready, rowwise, columnwise;
};

struct DequantizeAttributes {
  static constexpr int kBatchedResults = 1;
  int32_t version, batch_rank;
  int64_t axes;
  int32_t format, columnwise;
};

struct GemmAttributes {
  static constexpr int kBatchedResults = 1;
  int32_t version, batch_rank;
  int64_t axes;
  int32_t a_format, a_columnwise, b_format, b_columnwise, has_bias, has_c;
  float alpha, beta;
  int32_t fast_accum;
};

struct BiasGradAttributes {
  static constexpr int kBatchedResults = 1;
  int32_t version, batch_rank;
  int64_t axes;
};

}  // namespace diptych::xla_ffi

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::AmaxAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::QuantizeAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("format"), StructMember<int32_t>("pow2"),
                                      StructMember<float>("eps"), StructMember<int32_t>("amax_ready"),
                                      StructMember<int32_t>("rowwise"), StructMember<int32_t>("columnwise"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::DequantizeAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("format"), StructMember<int32_t>("columnwise"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::GemmAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("a_format"), StructMember<int32_t>("a_columnwise"),
                                      StructMember<int32_t>("b_format"), StructMember<int32_t>("b_columnwise"),
                                      StructMember<int32_t>("has_bias"), StructMember<int32_t>("has_c"),
                                      StructMember<float>("alpha"), StructMember<float>("beta"),
                                      StructMember<int32_t>("fast_accum"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::BiasGradAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"));
