// The CUDA kernels that registry.cpp names. Arguments arrive checked; the current device is the tensors' device.
#pragma once

#include <cstdint>
#include <string>

#include "diptych/ops.h"

namespace diptych::cuda {

Status amax(const AmaxArgs&, const Execution&);
Status quantize(const QuantizeArgs&, const Execution&);
Status dequantize(const DequantizeArgs&, const Execution&);
Status bias_grad(const BiasGradArgs&, const Execution&);

// Native FP8 tensor cores through cuBLASLt, opened at run time. `fits` says whether the operands suit it.
bool gemm_cublaslt_fits(const GemmArgs&, int arch);
Status gemm_cublaslt(const GemmArgs&, const Execution&);

// Any pair of formats: decodes to bfloat16 in shared memory and accumulates in float32.
Status gemm_emulated(const GemmArgs&, const Execution&);

int64_t gemm_workspace_bytes(int64_t m, int64_t n, int64_t k);
int64_t bias_grad_workspace_bytes(int64_t m, int64_t n);

int device_count();              // 0 without a driver; never throws, loads libcuda on the first call
int arch(int device_index);      // 90 for sm_90
std::string cublaslt_version();  // "" until it can be opened
Status use_device(int device_index, int* previous);  // makes it current; restore with the returned previous

}  // namespace diptych::cuda
