// cuBLASLt, opened at run time. A library that the process has loaded already comes first, so that a framework's
// version is shared.
#pragma once

#include <string>

#include "cuda/gemm/cublaslt_abi.h"
#include "diptych/status.h"

namespace diptych::cuda::cublaslt {

// Returns the entry points, or null with the reason in `why`. The library is opened once; after a failure a call tries
// again if a framework has loaded the library since, or if set_cublaslt_path was called.
const Api* open(std::string* why);

size_t version();  // major * 10000 + minor * 100 + patch; 0 if it cannot be opened

Status check(Result, const char* what);

}  // namespace diptych::cuda::cublaslt
