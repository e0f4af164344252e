// The attribute struct of each op, field for field what diptych/jax/ffi.py builds. XLA decodes them strictly by name,
// number and type; `version` says that both sides mean the same by them.
#pragma once

#include <cstdint>

#include "diptych/grouped.h"
#include "diptych/moe.h"
#include "diptych/ops.h"
#include "xla/ffi/api/ffi.h"

namespace diptych::xla_ffi {

inline constexpr int32_t kAttributesVersion = 5;

// `batch_rank` axes of vmap lie in front of every result, the outermost first. `axes` holds 8 bits per operand, in
// operand order: bit 0 says that the operand has the innermost axis, bit 1 the next one. It has those axes in front.
// Results past `batched_results()` are workspaces, which all batch elements share. `source`, `kind`, `option`: what is
// encoded instead of x: SourceKind, Norm or Activation, zero_centered_gamma or gated; of permuted rows the first alone.
struct AmaxAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int32_t flags, columnwise, source, kind, option, has_beta;
  int batched_results() const { return 2; }
};

// `has_amax`, `has_columnwise_amax`: the tensor is there, as an operand where `amax_mode` is given, else as a result.
struct QuantizeAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int32_t format, flags;
  float eps;
  int32_t amax_mode, has_amax, has_columnwise_amax, has_scale, has_rng, rowwise, columnwise;
  int32_t source, kind, option, has_beta, column_sum;
  int batched_results() const {
    const bool given = amax_mode == static_cast<int32_t>(AmaxMode::given);
    return 2 * (rowwise + columnwise) + (given ? 0 : has_amax + has_columnwise_amax) + column_sum;
  }
};

struct ScaleUpdateAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int32_t has_reduced, has_amax;
  float fp8_max;
  int32_t margin, most_recent;
  int batched_results() const { return 2; }
};

struct DequantizeAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int32_t format, columnwise, has_amax;
  int batched_results() const { return 1; }
};

struct GemmAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int32_t a_format, a_columnwise, a_has_amax, b_format, b_columnwise, b_has_amax, has_bias, has_c;
  float alpha, beta;
  int32_t fast_accum;
  int batched_results() const { return 1; }
};

struct BiasGradAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int batched_results() const { return 1; }
};

struct NormAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int32_t kind;
  float eps;
  int32_t zero_centered_gamma, has_y, has_beta;
  int batched_results() const { return 3; }
};

struct NormGradAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int32_t kind, zero_centered_gamma, has_dbeta;
  int batched_results() const { return 2 + has_dbeta; }
};

struct ActivationAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int32_t kind, gated;
  int batched_results() const { return 1; }
};

struct ActivationGradAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int32_t kind, gated;
  int batched_results() const { return 1; }
};

// `kind`: RoutingMap.
struct PermuteMapAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int32_t kind, align;
  int batched_results() const { return 4; }
};

struct ChunkMapAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int batched_results() const { return 2; }
};

struct InvertMapAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int batched_results() const { return 2; }
};

// `fill0`...: what absent rows of each plane hold.
struct PermuteAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int32_t planes, fill0, fill1, fill2, fill3, has_probs, zero_prob_is_padding;
  int batched_results() const { return planes + has_probs; }
};

struct PermuteColumnsAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int32_t slots;
  int batched_results() const { return 1; }
};

struct UnpermuteAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int32_t has_probs, has_permuted_dprobs;
  int batched_results() const { return 1 + has_permuted_dprobs; }
};

struct UnpermuteGradAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int32_t has_dprobs;
  int batched_results() const { return 1 + has_dprobs; }
};

// Of ops on stacks, whose buffers keep their first extent apart.
struct QuantizeStackAttributes {
  static constexpr int kRank = 3;
  int32_t version, batch_rank;
  int64_t axes;
  int32_t format, flags;
  float eps;
  int32_t amax_mode, has_amax, has_columnwise_amax, has_scale, has_rng, rowwise, columnwise;
  int batched_results() const {
    const bool given = amax_mode == static_cast<int32_t>(AmaxMode::given);
    return 2 * (rowwise + columnwise) + (given ? 0 : has_amax + has_columnwise_amax);
  }
};

// `kind`: GroupKind. `has_c`: the product is added to it.
struct GroupedGemmAttributes {
  static constexpr int kRank = 3;
  int32_t version, batch_rank;
  int64_t axes;
  int32_t a_format, a_columnwise, a_has_amax, b_format, b_columnwise, b_has_amax, has_bias, has_c, kind, align, rotated;
  float alpha;
  int32_t fast_accum;
  int batched_results() const { return 1; }
};

struct GroupedBiasGradAttributes {
  int32_t version, batch_rank;
  int64_t axes;
  int batched_results() const { return 1; }
};

}  // namespace diptych::xla_ffi

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::AmaxAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("flags"), StructMember<int32_t>("columnwise"),
                                      StructMember<int32_t>("source"), StructMember<int32_t>("kind"),
                                      StructMember<int32_t>("option"), StructMember<int32_t>("has_beta"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::QuantizeAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("format"), StructMember<int32_t>("flags"),
                                      StructMember<float>("eps"), StructMember<int32_t>("amax_mode"),
                                      StructMember<int32_t>("has_amax"), StructMember<int32_t>("has_columnwise_amax"),
                                      StructMember<int32_t>("has_scale"), StructMember<int32_t>("has_rng"),
                                      StructMember<int32_t>("rowwise"), StructMember<int32_t>("columnwise"),
                                      StructMember<int32_t>("source"), StructMember<int32_t>("kind"),
                                      StructMember<int32_t>("option"), StructMember<int32_t>("has_beta"),
                                      StructMember<int32_t>("column_sum"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::ScaleUpdateAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("has_reduced"), StructMember<int32_t>("has_amax"),
                                      StructMember<float>("fp8_max"), StructMember<int32_t>("margin"),
                                      StructMember<int32_t>("most_recent"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::DequantizeAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("format"), StructMember<int32_t>("columnwise"),
                                      StructMember<int32_t>("has_amax"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::GemmAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("a_format"), StructMember<int32_t>("a_columnwise"),
                                      StructMember<int32_t>("a_has_amax"), StructMember<int32_t>("b_format"),
                                      StructMember<int32_t>("b_columnwise"), StructMember<int32_t>("b_has_amax"),
                                      StructMember<int32_t>("has_bias"), StructMember<int32_t>("has_c"),
                                      StructMember<float>("alpha"), StructMember<float>("beta"),
                                      StructMember<int32_t>("fast_accum"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::BiasGradAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::NormAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("kind"), StructMember<float>("eps"),
                                      StructMember<int32_t>("zero_centered_gamma"), StructMember<int32_t>("has_y"),
                                      StructMember<int32_t>("has_beta"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::NormGradAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("kind"), StructMember<int32_t>("zero_centered_gamma"),
                                      StructMember<int32_t>("has_dbeta"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::ActivationAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("kind"), StructMember<int32_t>("gated"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::ActivationGradAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("kind"), StructMember<int32_t>("gated"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::PermuteMapAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("kind"), StructMember<int32_t>("align"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::ChunkMapAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::InvertMapAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::PermuteAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("planes"), StructMember<int32_t>("fill0"),
                                      StructMember<int32_t>("fill1"), StructMember<int32_t>("fill2"),
                                      StructMember<int32_t>("fill3"), StructMember<int32_t>("has_probs"),
                                      StructMember<int32_t>("zero_prob_is_padding"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::PermuteColumnsAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("slots"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::UnpermuteAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("has_probs"), StructMember<int32_t>("has_permuted_dprobs"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::UnpermuteGradAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("has_dprobs"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::QuantizeStackAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("format"), StructMember<int32_t>("flags"),
                                      StructMember<float>("eps"), StructMember<int32_t>("amax_mode"),
                                      StructMember<int32_t>("has_amax"), StructMember<int32_t>("has_columnwise_amax"),
                                      StructMember<int32_t>("has_scale"), StructMember<int32_t>("has_rng"),
                                      StructMember<int32_t>("rowwise"), StructMember<int32_t>("columnwise"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::GroupedGemmAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"),
                                      StructMember<int32_t>("a_format"), StructMember<int32_t>("a_columnwise"),
                                      StructMember<int32_t>("a_has_amax"), StructMember<int32_t>("b_format"),
                                      StructMember<int32_t>("b_columnwise"), StructMember<int32_t>("b_has_amax"),
                                      StructMember<int32_t>("has_bias"), StructMember<int32_t>("has_c"),
                                      StructMember<int32_t>("kind"), StructMember<int32_t>("align"),
                                      StructMember<int32_t>("rotated"), StructMember<float>("alpha"),
                                      StructMember<int32_t>("fast_accum"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::GroupedBiasGradAttributes, StructMember<int32_t>("version"),
                                      StructMember<int32_t>("batch_rank"), StructMember<int64_t>("axes"));
