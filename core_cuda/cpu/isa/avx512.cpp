// The kernels for AVX-512 F, BW, DQ and VL. All code between DIPTYCH_TARGET_BEGIN and DIPTYCH_TARGET_END is compiled
// for them, and runs only on processors that have them.
#include "cpu/isa/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <utility>

#include "cpu/isa/target.h"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own _mm512_undefined_epi32
#endif
DIPTYCH_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#define DIPTYCH_ISA avx512
#define DIPTYCH_LANES 16
#include "cpu/isa/make_kernels.h"

namespace diptych::cpu::avx512 {
static constexpr Kernels table = make_kernels("avx512");
}
DIPTYCH_TARGET_END

namespace diptych::cpu {
const Kernels* avx512_kernels() { return &avx512::table; }
}  // namespace diptych::cpu
#else
namespace diptych::cpu {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace diptych::cpu
#endif
