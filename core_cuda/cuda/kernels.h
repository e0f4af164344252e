// The CUDA kernels that registry.cpp names. Arguments arrive checked; the current device is the tensors' device.
#pragma once

#include <cstdint>
#include <string>

#include "diptych/grouped.h"
#include "diptych/ops.h"

namespace diptych::cuda {

// All but gemm and grouped_gemm, of which there are two.
#define OP(name, Args, ...) Status name(const Args&, const Execution&);
#include "diptych/ops.def"
bool quantize_stack_fits(const QuantizeArgs&);
Status quantize_stack(const QuantizeArgs&, const Execution&);

// Native FP8 tensor cores through cuBLASLt, opened at run time. `fits` says whether the operands suit it and the
// library has an algorithm for them; where it has none, or cannot be opened, it says why on stderr, once.
bool gemm_cublaslt_fits(const GemmArgs&, int arch);
Status gemm_cublaslt(const GemmArgs&, const Execution&);

// Any pair of formats: decodes to bfloat16 in shared memory and accumulates in float32.
Status gemm_emulated(const GemmArgs&, const Execution&);

// Products of groups on Hopper's FP8 tensor cores.
bool grouped_gemm_native_fits(const GroupedGemmArgs&, int arch);
Status grouped_gemm_native(const GroupedGemmArgs&, const Execution&);

// The same for any pair of formats, as gemm_emulated.
Status grouped_gemm_emulated(const GroupedGemmArgs&, const Execution&);

int64_t gemm_workspace_bytes(int64_t m, int64_t n, int64_t k, bool epilogue);
int64_t bias_grad_workspace_bytes(int64_t m, int64_t n);
int64_t norm_grad_workspace_bytes(int64_t m, int64_t k);
int64_t column_sum_workspace_bytes(int64_t m, int64_t k);
int64_t permute_map_workspace_bytes(RoutingMap kind, int64_t items, int64_t experts);
int64_t grouped_bias_grad_workspace_bytes(int64_t rows, int64_t cols, int64_t groups);

int device_count();                        // 0 without a driver; never throws, loads libcuda on the first call
int arch(int device_index);                // 90 for sm_90
std::string cublaslt_version();            // "" until it can be opened
void set_cublaslt_path(const char* path);  // a file to try where no framework has loaded the library; null: none
Status prepare(int device_index);  // opens cuBLASLt and makes its handle: call it before the first stream capture
Status use_device(int device_index, int* previous);  // makes it current; restore with the returned previous

}  // namespace diptych::cuda
