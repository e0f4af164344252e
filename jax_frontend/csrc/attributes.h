// The attribute struct of each op, with the fields that diptych/jax/primitives/ffi.py builds. XLA decodes fields
// strictly by name, number and type; `version` ensures that both sides give them the same meaning.
#pragma once

#include <cstdint>

#include "diptych/grouped.h"
#include "diptych/ops.h"
#include "diptych/permute.h"
#include "xla/ffi/api/ffi.h"

namespace diptych::xla_ffi {

// clang-format off: it breaks the lists of fields at odd places
// Each struct's fields are listed once, by a macro that declares them and tells XLA their names and types.
#define DIPTYCH_FIELD(type, name) type name;
#define DIPTYCH_MEMBER(type, name) , StructMember<type>(#name)
#define DIPTYCH_COMMON_FIELDS(F) F(int32_t, version) F(int32_t, batch_rank) F(int64_t, axes)
#define DIPTYCH_NO_FIELDS(F)
#define DIPTYCH_DECODED(Attributes, FIELDS)                                                             \
  XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(diptych::xla_ffi::Attributes, StructMember<int32_t>("version"), \
                                        StructMember<int32_t>("batch_rank"),                            \
                                        StructMember<int64_t>("axes") FIELDS(DIPTYCH_MEMBER))

inline constexpr int32_t kAttributesVersion = 5;

#define DIPTYCH_AMAX_FIELDS(F) \
  F(int32_t, flags) F(int32_t, columnwise) F(int32_t, source) F(int32_t, kind) F(int32_t, option) \
  F(int32_t, has_beta)
// `batch_rank` axes of vmap lie in front of every result, the outermost first. `axes` holds 8 bits for each operand, in
// operand order: bit 0 is set if the operand has the innermost axis, bit 1 for the next one. An operand's batch axes
// are its first. Results past `batched_results()` are workspaces, which all batch elements share. `source`: SourceKind;
// `kind`: its Norm or Activation; `option`: zero_centered_gamma or gated. Permuted rows use `source` alone.
struct AmaxAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_AMAX_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 2; }
};

#define DIPTYCH_QUANTIZE_FIELDS(F) \
  F(int32_t, format) F(int32_t, flags) F(float, eps) F(int32_t, amax_mode) F(int32_t, has_amax) \
  F(int32_t, has_columnwise_amax) F(int32_t, has_scale) F(int32_t, has_rng) F(int32_t, rowwise) \
  F(int32_t, columnwise) F(int32_t, source) F(int32_t, kind) F(int32_t, option) F(int32_t, has_beta) \
  F(int32_t, column_sum)
// `has_amax`, `has_columnwise_amax`: the tensor exists, as an operand if `amax_mode` is given, else as a result.
struct QuantizeAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_QUANTIZE_FIELDS(DIPTYCH_FIELD)
  int batched_results() const {
    const bool given = amax_mode == static_cast<int32_t>(AmaxMode::given);
    return 2 * (rowwise + columnwise) + (given ? 0 : has_amax + has_columnwise_amax) + column_sum;
  }
};

#define DIPTYCH_SCALE_UPDATE_FIELDS(F) \
  F(int32_t, has_reduced) F(int32_t, has_amax) F(float, fp8_max) F(int32_t, margin) F(int32_t, most_recent)
struct ScaleUpdateAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_SCALE_UPDATE_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 2; }
};

#define DIPTYCH_DEQUANTIZE_FIELDS(F) F(int32_t, format) F(int32_t, columnwise) F(int32_t, has_amax)
struct DequantizeAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_DEQUANTIZE_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 1; }
};

#define DIPTYCH_GEMM_FIELDS(F) \
  F(int32_t, a_format) F(int32_t, a_columnwise) F(int32_t, a_has_amax) F(int32_t, b_format) \
  F(int32_t, b_columnwise) F(int32_t, b_has_amax) F(int32_t, has_bias) F(int32_t, has_c) F(float, alpha) \
  F(float, beta) DIPTYCH_GEMM_OPTIONS(F, int32_t)
struct GemmAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_GEMM_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 1; }
};

#define DIPTYCH_OPTION_OF(attributes, name) attributes.name != 0,
template <typename Attributes>
GemmOptions gemm_options(const Attributes& d) {
  return {DIPTYCH_GEMM_OPTIONS(DIPTYCH_OPTION_OF, d)};
}

struct BiasGradAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 1; }
};

#define DIPTYCH_NORM_FIELDS(F) \
  F(int32_t, kind) F(float, eps) F(int32_t, zero_centered_gamma) F(int32_t, has_y) F(int32_t, has_beta)
struct NormAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_NORM_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 3; }
};

#define DIPTYCH_NORM_GRAD_FIELDS(F) F(int32_t, kind) F(int32_t, zero_centered_gamma) F(int32_t, has_dbeta)
struct NormGradAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_NORM_GRAD_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 2 + has_dbeta; }
};

#define DIPTYCH_ACTIVATION_FIELDS(F) F(int32_t, kind) F(int32_t, gated)
struct ActivationAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_ACTIVATION_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 1; }
};

#define DIPTYCH_ACTIVATION_GRAD_FIELDS(F) F(int32_t, kind) F(int32_t, gated)
struct ActivationGradAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_ACTIVATION_GRAD_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 1; }
};

#define DIPTYCH_PERMUTE_MAP_FIELDS(F) F(int32_t, kind) F(int32_t, align)
// `kind`: RoutingMap.
struct PermuteMapAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_PERMUTE_MAP_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 4; }
};

struct ChunkMapAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 2; }
};

struct InvertMapAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 2; }
};

#define DIPTYCH_PERMUTE_FIELDS(F) \
  F(int32_t, planes) F(int32_t, fill0) F(int32_t, fill1) F(int32_t, fill2) F(int32_t, fill3) F(int32_t, has_probs) \
  F(int32_t, zero_prob_is_padding)
// `fill0`...: the four bytes that absent rows of each plane repeat.
struct PermuteAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_PERMUTE_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return planes + has_probs; }
};

#define DIPTYCH_PERMUTE_COLUMNS_FIELDS(F) F(int32_t, slots)
struct PermuteColumnsAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_PERMUTE_COLUMNS_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 1; }
};

#define DIPTYCH_UNPERMUTE_FIELDS(F) F(int32_t, has_probs) F(int32_t, has_permuted_dprobs)
struct UnpermuteAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_UNPERMUTE_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 1 + has_permuted_dprobs; }
};

#define DIPTYCH_UNPERMUTE_GRAD_FIELDS(F) F(int32_t, has_dprobs)
struct UnpermuteGradAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_UNPERMUTE_GRAD_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 1 + has_dprobs; }
};

#define DIPTYCH_QUANTIZE_STACK_FIELDS(F) \
  F(int32_t, format) F(int32_t, flags) F(float, eps) F(int32_t, amax_mode) F(int32_t, has_amax) \
  F(int32_t, has_columnwise_amax) F(int32_t, has_scale) F(int32_t, has_rng) F(int32_t, rowwise) \
  F(int32_t, columnwise)
// kRank 3: buffers of stacks do not fold their first dimension, G.
struct QuantizeStackAttributes {
  static constexpr int kRank = 3;
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_QUANTIZE_STACK_FIELDS(DIPTYCH_FIELD)
  int batched_results() const {
    const bool given = amax_mode == static_cast<int32_t>(AmaxMode::given);
    return 2 * (rowwise + columnwise) + (given ? 0 : has_amax + has_columnwise_amax);
  }
};

#define DIPTYCH_GROUPED_GEMM_FIELDS(F) \
  F(int32_t, a_format) F(int32_t, a_columnwise) F(int32_t, a_has_amax) F(int32_t, b_format) \
  F(int32_t, b_columnwise) F(int32_t, b_has_amax) F(int32_t, has_bias) F(int32_t, has_c) F(int32_t, kind) \
  F(int32_t, align) F(int32_t, rotated) F(float, alpha) DIPTYCH_GEMM_OPTIONS(F, int32_t)
// `kind`: GroupKind. `has_c`: the product is added to an operand c (beta is 1).
struct GroupedGemmAttributes {
  static constexpr int kRank = 3;
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_GROUPED_GEMM_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 1; }
};

struct GroupedBiasGradAttributes {
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 1; }
};

// kBytes: operands may have any element type of whole bytes, and are read as bytes in one dimension.
struct HashAttributes {
  static constexpr bool kBytes = true;
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 1; }
};

// clang-format on
}  // namespace diptych::xla_ffi

DIPTYCH_DECODED(AmaxAttributes, DIPTYCH_AMAX_FIELDS);
DIPTYCH_DECODED(QuantizeAttributes, DIPTYCH_QUANTIZE_FIELDS);
DIPTYCH_DECODED(ScaleUpdateAttributes, DIPTYCH_SCALE_UPDATE_FIELDS);
DIPTYCH_DECODED(DequantizeAttributes, DIPTYCH_DEQUANTIZE_FIELDS);
DIPTYCH_DECODED(GemmAttributes, DIPTYCH_GEMM_FIELDS);
DIPTYCH_DECODED(BiasGradAttributes, DIPTYCH_NO_FIELDS);
DIPTYCH_DECODED(NormAttributes, DIPTYCH_NORM_FIELDS);
DIPTYCH_DECODED(NormGradAttributes, DIPTYCH_NORM_GRAD_FIELDS);
DIPTYCH_DECODED(ActivationAttributes, DIPTYCH_ACTIVATION_FIELDS);
DIPTYCH_DECODED(ActivationGradAttributes, DIPTYCH_ACTIVATION_GRAD_FIELDS);
DIPTYCH_DECODED(PermuteMapAttributes, DIPTYCH_PERMUTE_MAP_FIELDS);
DIPTYCH_DECODED(ChunkMapAttributes, DIPTYCH_NO_FIELDS);
DIPTYCH_DECODED(InvertMapAttributes, DIPTYCH_NO_FIELDS);
DIPTYCH_DECODED(PermuteAttributes, DIPTYCH_PERMUTE_FIELDS);
DIPTYCH_DECODED(PermuteColumnsAttributes, DIPTYCH_PERMUTE_COLUMNS_FIELDS);
DIPTYCH_DECODED(UnpermuteAttributes, DIPTYCH_UNPERMUTE_FIELDS);
DIPTYCH_DECODED(UnpermuteGradAttributes, DIPTYCH_UNPERMUTE_GRAD_FIELDS);
DIPTYCH_DECODED(QuantizeStackAttributes, DIPTYCH_QUANTIZE_STACK_FIELDS);
DIPTYCH_DECODED(GroupedGemmAttributes, DIPTYCH_GROUPED_GEMM_FIELDS);
DIPTYCH_DECODED(GroupedBiasGradAttributes, DIPTYCH_NO_FIELDS);
DIPTYCH_DECODED(HashAttributes, DIPTYCH_NO_FIELDS);
