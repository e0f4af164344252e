// AVX2 with FMA and F16C; everything below the region's start is compiled for it, and run only where the processor has
// it.
#include "cpu/isa/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <utility>

#include "cpu/isa/target.h"
DIPTYCH_TARGET_BEGIN("avx2,fma,f16c")
#define DIPTYCH_ISA avx2
#define DIPTYCH_LANES 8
#include "cpu/isa/simd_gemm.h"

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
