// The FP8 and bfloat16 instructions of Hopper's warpgroups (sm_90a). PTX ISA: "Asynchronous Warpgroup Level Matrix
// Multiply-Accumulate Instructions", there "Matrix Fragments for wgmma.mma_async.m64nNk32" and ".m64nNk16" and "Shared
// Memory Matrix Layout".
//
// D [64, N] += A [64, k] @ B [N, k].T, where k is 32 FP8 or 16 bfloat16 elements, A and B in shared memory, D over the
// 128 threads of a warpgroup: thread t of warp w holds in d[4 j + r] row 16 w + t / 4 + 8 (r / 2) and column 8 j + 2 (t
// % 4) + r % 2.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.cuh"

namespace diptych::cuda::ptx {

enum class Element { e4m3, e5m2, bf16 };

// Rows of 128 bytes, eight of them in 1024 bytes, 16-byte chunk c of row r at c ^ (r % 8): what a tensor map with the
// 128-byte swizzle writes. `at`, an address in units of 16 bytes, is in the first of eight rows; the next 32 bytes of k
// are at `at` + 2.
__device__ __forceinline__ uint64_t matrix(uint32_t at) {
  // The upper half is the same for all, so that only the lower one needs computing.
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32;
  constexpr uint32_t kUnused = 1u << 16;
  return kSwizzle128 | kEightRows | (kUnused + at);
}
__device__ __forceinline__ uint32_t matrix_address(const void* shared) { return shared_address(shared) / 16; }

// A matrix whose every eight rows are the same 1024 bytes.
__device__ __forceinline__ uint64_t repeated_matrix(uint32_t at) { return matrix(at) & ~(uint64_t{0x3fff} << 32); }

// Orders register accesses before products: call it before the first product, and after each access to their registers.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a batch; products_wait<n> returns when all but the last n batches are done.
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler may not move accesses to d across this; without it, it would read sums before products_wait.
template <int kSums>
__device__ __forceinline__ void products_touch(float (&d)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define DIPTYCH_NAMES_64                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DIPTYCH_NAMES_96                                                             \
  DIPTYCH_NAMES_64                                                                   \
  ", "                                                                               \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define DIPTYCH_NAMES_128                                                                        \
  DIPTYCH_NAMES_96                                                                               \
  ", "                                                                                           \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define DIPTYCH_D8(i)                                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define DIPTYCH_D32(i) DIPTYCH_D8(i), DIPTYCH_D8(i + 8), DIPTYCH_D8(i + 16), DIPTYCH_D8(i + 24)
#define DIPTYCH_D64 DIPTYCH_D32(0), DIPTYCH_D32(32)
#define DIPTYCH_D96 DIPTYCH_D64, DIPTYCH_D32(64)
#define DIPTYCH_D128 DIPTYCH_D96, DIPTYCH_D32(96)
// The operands after the sums are numbered by hand: A's matrix, B's, and whether to add. TYPES: of k, A and B; MORE:
// further immediate operands.
#define DIPTYCH_PRODUCT(N, NAMES, SUMS, MATRICES, ADD, TYPES, MORE)                                            \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " ADD                                                     \
               ", 0;\n\t"                                                                                      \
               "wgmma.mma_async.sync.aligned.m64n" N TYPES " {" NAMES "}, " MATRICES ", p, 1, 1" MORE ";\n\t}" \
               : SUMS                                                                                          \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define DIPTYCH_PRODUCTS(TYPES, MORE)                                                           \
  if constexpr (kSums == 64) {                                                                  \
    DIPTYCH_PRODUCT("128", DIPTYCH_NAMES_64, DIPTYCH_D64, "%64, %65", "%66", TYPES, MORE);      \
  } else if constexpr (kSums == 96) {                                                           \
    DIPTYCH_PRODUCT("192", DIPTYCH_NAMES_96, DIPTYCH_D96, "%96, %97", "%98", TYPES, MORE);      \
  } else {                                                                                      \
    static_assert(kSums == 128);                                                                \
    DIPTYCH_PRODUCT("256", DIPTYCH_NAMES_128, DIPTYCH_D128, "%128, %129", "%130", TYPES, MORE); \
  }

// d[0 .. kSums - 1] = a @ b.T, or d + that if `add`, over 2 kSums columns and 32 bytes of k. A kernel needs about 26
// more registers for each thread, by its launch bounds, than one of its products has sums.
template <Element kA, Element kB, int kSums>
__device__ __forceinline__ void product(float* d, uint64_t a, uint64_t b, bool add) {
  if constexpr (kA == Element::bf16) {
    static_assert(kB == Element::bf16);
    DIPTYCH_PRODUCTS("k16.f32.bf16.bf16", ", 0, 0");  // neither operand is transposed
  } else if constexpr (kA == Element::e5m2 && kB == Element::e5m2) {
    DIPTYCH_PRODUCTS("k32.f32.e5m2.e5m2", "");
  } else if constexpr (kA == Element::e5m2) {
    DIPTYCH_PRODUCTS("k32.f32.e5m2.e4m3", "");
  } else if constexpr (kB == Element::e5m2) {
    DIPTYCH_PRODUCTS("k32.f32.e4m3.e5m2", "");
  } else {
    DIPTYCH_PRODUCTS("k32.f32.e4m3.e4m3", "");
  }
}

#undef DIPTYCH_PRODUCTS
#undef DIPTYCH_PRODUCT
#undef DIPTYCH_D128
#undef DIPTYCH_D96
#undef DIPTYCH_D64
#undef DIPTYCH_D32
#undef DIPTYCH_D8
#undef DIPTYCH_NAMES_128
#undef DIPTYCH_NAMES_96
#undef DIPTYCH_NAMES_64

}  // namespace diptych::cuda::ptx
