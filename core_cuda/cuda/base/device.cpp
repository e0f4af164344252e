#include "cuda/base/device.h"

#include <array>
#include <atomic>

namespace diptych::cuda {
namespace {

constexpr int kCachedDevices = 64;
std::array<std::atomic<int64_t>, kCachedDevices> g_info{};  // shared_kib << 48 | arch << 32 | sm_count; 0: not read yet

int attribute(cudaDeviceAttr attr, int device_index) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, attr, device_index) == cudaSuccess) return value;
  (void)cudaGetLastError();  // a device that cannot be read is reported as arch 0
  return 0;
}

}  // namespace

Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return {Code::runtime,
          std::string("CUDA: ") + what + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")"};
}

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();  // no driver, or no device that it may use
  return 0;
}

DeviceInfo device_info(int device_index) {
  const bool cached = device_index >= 0 && device_index < kCachedDevices;
  int64_t packed = cached ? g_info[device_index].load(std::memory_order_relaxed) : 0;
  if (packed == 0) {
    const int64_t arch = attribute(cudaDevAttrComputeCapabilityMajor, device_index) * 10 +
                         attribute(cudaDevAttrComputeCapabilityMinor, device_index);
    const int64_t shared_kib = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device_index) / 1024;
    packed = shared_kib << 48 | arch << 32 | attribute(cudaDevAttrMultiProcessorCount, device_index);
    if (cached) g_info[device_index].store(packed, std::memory_order_relaxed);  // every thread stores the same
  }
  return {static_cast<int>(packed >> 32 & 0xffff), static_cast<int>(packed & 0xffffffff),
          static_cast<int>(packed >> 48)};
}

int arch(int device_index) { return device_info(device_index).arch; }

Status use_device(int device_index, int* previous) {
  DIPTYCH_CUDA_TRY(cudaGetDevice(previous));
  if (*previous != device_index) DIPTYCH_CUDA_TRY(cudaSetDevice(device_index));
  return {};
}

}  // namespace diptych::cuda
