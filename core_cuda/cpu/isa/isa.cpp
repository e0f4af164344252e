// Chooses the best instruction set that the processor has, once.
#include "cpu/isa/isa.h"

#include <atomic>
#include <cstring>

#include "cpu/kernels.h"

namespace diptych::cpu {
namespace {

const Kernels* usable(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && !std::strcmp(name, "avx512")) return avx512_kernels();
  if (avx2 && !std::strcmp(name, "avx2")) return avx2_kernels();
#endif
  return std::strcmp(name, "generic") ? nullptr : generic_kernels();
}

const Kernels* best() {
  for (const char* name : {"avx512", "avx2"})
    if (const Kernels* k = usable(name)) return k;
  return generic_kernels();
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> k{best()};
  return k;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }
const char* isa() { return kernels().name; }

bool set_isa(const char* name) {
  const Kernels* k = usable(name);
  if (k) chosen().store(k, std::memory_order_relaxed);
  return k != nullptr;
}

}  // namespace diptych::cpu
