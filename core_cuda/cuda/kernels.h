// The CUDA kernels that registry.cpp names, beside those that have an op's name. Arguments arrive checked; the current
// device is the tensors' device.
#pragma once

#include <cstdint>
#include <string>

#include "diptych/grouped.h"
#include "diptych/many.h"
#include "diptych/permute.h"

namespace diptych::cuda {

// The kernels of quantize; the kernel table names the formats of each. `prepared` first computes what all of them need:
// column sums, and the amax of the whole tensor.
bool quantize_permuted_rows_fits(const QuantizeArgs&);  // permuted rows, only a rowwise copy, blocks of one row
Status quantize_permuted_rows(const QuantizeArgs&, const Execution&);
bool quantize_permuted_both_fits(const QuantizeArgs&);  // both copies of permuted rows in one gather
Status quantize_permuted_both(const QuantizeArgs&, const Execution&);
bool quantize_permuted_split_fits(const QuantizeArgs&);  // both copies, with one kernel for each
Status quantize_permuted_split(const QuantizeArgs&, const Execution&);
Status quantize_mxfp8(const QuantizeArgs&, const Execution&);  // 1x32 with E8M0 scales
Status quantize_nvfp4(const QuantizeArgs&, const Execution&);  // E2M1 1x16 with E4M3 scales
bool quantize_stream_fits(const QuantizeArgs&);                // only a rowwise copy, of plain x
Status quantize_stream(const QuantizeArgs&, const Execution&);
bool quantize_permuted_strips_fits(const QuantizeArgs&);  // square blocks of permuted rows, where much is written
Status quantize_permuted_strips(const QuantizeArgs&, const Execution&);
Status quantize_tiles(const QuantizeArgs&, const Execution&);  // float32 scales: per-tensor, 1x128, 128x128
Status prepare_quantize(const QuantizeArgs&, const Execution&);
template <Status (*encode)(const QuantizeArgs&, const Execution&)>
Status prepared(const QuantizeArgs& args, const Execution& exec) {
  DIPTYCH_TRY(prepare_quantize(args, exec));
  return encode(args, exec);
}
bool quantize_stack_fits(const QuantizeStackArgs&);
bool quantize_many_fits(const QuantizeManyArgs&);

// Native FP8 tensor cores through cuBLASLt, which is opened at run time. `fits` returns whether the operands suit
// cuBLASLt and it has an algorithm for them. If it has none or cannot be opened, `fits` warns once with the reason.
bool gemm_cublaslt_fits(const GemmArgs&);
Status gemm_cublaslt(const GemmArgs&, const Execution&);

// Native FP8 tensor cores of Hopper, as one group of grouped_gemm_native. `pays`: faster than cuBLASLt, by a rule of
// shape, formats, options and the number of SMs alone.
bool gemm_native_pays(const GemmArgs&);
bool gemm_native_fits(const GemmArgs&);
Status gemm_native(const GemmArgs&, const Execution&);

// MXFP8 and NVFP4 on Hopper: decoded to bfloat16 in the workspace, multiplied by its tensor cores.
bool gemm_decoded_fits(const GemmArgs&);
Status gemm_decoded(const GemmArgs&, const Execution&);
bool grouped_gemm_decoded_fits(const GroupedGemmArgs&);
Status grouped_gemm_decoded(const GroupedGemmArgs&, const Execution&);

// Any pair of formats: decodes to bfloat16 in shared memory and accumulates in float32.
Status gemm_emulated(const GemmArgs&, const Execution&);

// Permutes rows in slices of tokens, each of which fills all SMs at once; `fits` if there is much to move.
bool permute_slices_fits(const PermuteArgs&);
Status permute_slices(const PermuteArgs&, const Execution&);

// grouped_gemm on Hopper's FP8 tensor cores.
bool grouped_gemm_native_fits(const GroupedGemmArgs&);
Status grouped_gemm_native(const GroupedGemmArgs&, const Execution&);

// grouped_gemm for any pair of formats, emulated as in gemm_emulated.
Status grouped_gemm_emulated(const GroupedGemmArgs&, const Execution&);

int64_t gemm_workspace_bytes(FormatId a, FormatId b, int64_t m, int64_t n, int64_t k, bool epilogue);
int64_t decoded_workspace_bytes(FormatId a, FormatId b, int64_t m, int64_t n, int64_t k, int64_t groups,
                                bool by_groups);
int64_t bias_grad_workspace_bytes(int64_t m, int64_t n);
int64_t norm_grad_workspace_bytes(int64_t m, int64_t k);
int64_t column_sum_workspace_bytes(int64_t m, int64_t k);
int64_t permute_map_workspace_bytes(RoutingMap kind, int64_t items, int64_t experts);
int64_t grouped_bias_grad_workspace_bytes(int64_t rows, int64_t cols, int64_t groups);

int device_count();                        // 0 without a driver; never throws, loads libcuda on the first call
int arch(int device_index);                // 90 for sm_90
std::string cublaslt_version();            // "" if it cannot be opened
void set_cublaslt_path(const char* path);  // a file to try where no framework has loaded the library; null: none
Status prepare(int device_index);  // opens cuBLASLt and makes its handle: call it before the first stream capture
Status use_device(int device_index, int* previous);  // makes the device current; restore with *previous

}  // namespace diptych::cuda
