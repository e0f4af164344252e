// The kernels for any processor: four lanes, which GCC and Clang map to SSE2 or NEON.
#define DIPTYCH_ISA generic
#define DIPTYCH_LANES 4
#include "cpu/isa/make_kernels.h"

namespace diptych::cpu {

const Kernels* generic_kernels() {
  static constexpr Kernels table = make_kernels("generic");
  return &table;
}

}  // namespace diptych::cpu
