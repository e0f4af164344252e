// The kernels for AVX2 with FMA and F16C. All code between DIPTYCH_TARGET_BEGIN and DIPTYCH_TARGET_END is compiled for
// them, and runs only on processors that have them.
#include "cpu/isa/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <utility>

#include "cpu/isa/target.h"
DIPTYCH_TARGET_BEGIN("avx2,fma,f16c")
#define DIPTYCH_ISA avx2
#define DIPTYCH_LANES 8
#include "cpu/isa/make_kernels.h"

namespace diptych::cpu::avx2 {
static constexpr Kernels table = make_kernels("avx2");
}
DIPTYCH_TARGET_END

namespace diptych::cpu {
const Kernels* avx2_kernels() { return &avx2::table; }
}  // namespace diptych::cpu
#else
namespace diptych::cpu {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace diptych::cpu
#endif
