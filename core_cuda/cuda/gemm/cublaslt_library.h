// cuBLASLt opened at run time: the library that the process already has, so that a framework's version is shared.
#pragma once

#include <string>

#include "cuda/gemm/cublaslt_abi.h"
#include "diptych/status.h"

namespace diptych::cuda::cublaslt {

// The entry points, or null with the reason in `why`. Opened once; a failure is tried again when a framework has
// loaded the library since, or another path was set.
const Api* open(std::string* why);

size_t version();  // 0 until it is open

Status check(Result, const char* what);

}  // namespace diptych::cuda::cublaslt
