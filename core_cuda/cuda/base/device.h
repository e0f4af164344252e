// Host helpers of the CUDA backend: CUDA errors as Status, and properties of each device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "cuda/kernels.h"
#include "diptych/status.h"

namespace diptych::cuda {

Status cuda_status(cudaError_t error, const char* what);  // `what` names the call or kernel that failed

struct DeviceInfo {
  int arch = 0;  // 90 for sm_90; 0 where the device cannot be read
  int sm_count = 0;
  int shared_kib = 0;  // shared memory of an SM
};
DeviceInfo device_info(int device_index);  // cached per device

// Makes a device current and restores the previous one.
class DeviceScope {
 public:
  explicit DeviceScope(int device_index) : status_(use_device(device_index, &previous_)), device_(device_index) {}
  ~DeviceScope() {
    // A failure here cannot be returned; the next CUDA call of this thread reports it.
    if (status_.ok() && previous_ != device_) (void)cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  const Status& status() const { return status_; }

 private:
  int previous_ = 0;
  Status status_;
  int device_;
};

inline bool aligned(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace diptych::cuda

#define DIPTYCH_CUDA_TRY(expr) DIPTYCH_TRY(::diptych::cuda::cuda_status((expr), #expr))
