// Stands in for cuda/base/launch.cuh: a launch is a run of the simulation, and its result a Status.
#pragma once

#include "cuda/base/device.h"
#include "simulated.h"

#define DIPTYCH_DYNAMIC_SHARED_ALIGNED(name, bytes) unsigned char* name = simulated::self->block->shared.get()
#define DIPTYCH_DYNAMIC_SHARED(name) DIPTYCH_DYNAMIC_SHARED_ALIGNED(name, 16)

namespace diptych::cuda {

struct SharedGrant {
  template <typename Kernel>
  Status raise(Kernel*, int, int, int = 0) {
    return {};
  }
};

inline Status ended(const std::string& fault) { return fault.empty() ? Status{} : Status{Code::runtime, fault}; }

template <typename... Params>
Status launch(const char*, void (*kernel)(Params...), int64_t blocks, int threads, size_t shared_bytes, void*,
              std::type_identity_t<Params>... args) {
  return ended(simulated::run(static_cast<int>(blocks), 1, threads, shared_bytes, [&] { kernel(args...); }));
}

template <typename... Params>
Status launch_after(const char* name, void (*kernel)(Params...), int64_t blocks, int threads, size_t shared_bytes,
                    const Execution& exec, const std::type_identity_t<Params>&... args) {
  return launch(name, kernel, blocks, threads, shared_bytes, exec.stream, args...);
}

template <typename... Params>
Status launch_clusters(const char*, void (*kernel)(Params...), int64_t blocks, int cluster, int threads,
                       size_t shared_bytes, const Execution&, bool, const std::type_identity_t<Params>&... args) {
  return ended(simulated::run(static_cast<int>(blocks), cluster, threads, shared_bytes, [&] { kernel(args...); }));
}

}  // namespace diptych::cuda
