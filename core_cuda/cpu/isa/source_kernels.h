// What an instruction set provides for norms and activations: loops over float32 rows, all with identical bits. An
// output may be one of the inputs. They run inside an IeeeScope and never allocate.
#pragma once

#include <cstdint>

#include "diptych/source.h"

namespace diptych::cpu {

struct NormRow {
  const float* g;
  const float* beta;  // null: none
  float mu, rsigma;   // rmsnorm: mu is 0
};

struct FusedKernels {
  // sums of x and of (x - mu)^2, in an order that n alone fixes
  float (*sum)(const float* x, int64_t n);
  float (*squares)(const float* x, float mu, int64_t n);
  // g[i] = 1 + g[i]
  void (*add_one)(float* g, int64_t n);
  void (*normalize)(const NormRow&, const float* x, int64_t n, float* y);
  // dx; `centered`: subtracts mean(h). Also dgamma[i] += dy * xhat, and dbeta[i] += dy if dbeta is not null.
  void (*norm_grad)(const NormRow&, bool centered, const float* dy, const float* x, int64_t n, float* dx, float* dgamma,
                    float* dbeta);
  // b: the gate, or null
  void (*activation)(Activation, const float* a, const float* b, int64_t n, float* y);
  void (*activation_grad)(Activation, const float* dy, const float* a, const float* b, int64_t n, float* da, float* db);
};

}  // namespace diptych::cpu
