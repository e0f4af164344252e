// The instructions of the bfloat16 tensor core path (sm_80 and later), one function each.
#pragma once

#include "cuda/ptx/shared.cuh"

namespace diptych::cuda::ptx {

// Loads four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes,
// 16-byte aligned); register i gets elements (l / 4, 2 (l % 4)) and the next one of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

// Stores four such matrices, on sm_90 and later: register i holds elements (l / 4, 2 (l % 4)) and the next one of
// matrix i.
__device__ __forceinline__ void stmatrix_x4(void* shared_row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(shared_row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// d [16, 8] += a [16, 16] @ b [8, 16].T in float32.
// a: rows l / 4 and + 8 in a[0], a[1], columns 2 (l % 4); + 8 columns in a[2], a[3]. b likewise over l / 4.
// d: d[0], d[1] at row l / 4, columns 2 (l % 4) and the next; d[2], d[3] eight rows below.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace diptych::cuda::ptx
