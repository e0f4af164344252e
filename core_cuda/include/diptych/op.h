// What an op's header declares beside its arguments.
#pragma once

#include "diptych/status.h"
#include "diptych/tensor.h"

// The op, and each backend's kernel of its name. An op whose kernels have other names has none of its own.
#define DIPTYCH_OP(name, Args)                \
  Status name(const Args&, const Execution&); \
  namespace cpu {                             \
  Status name(const Args&, const Execution&); \
  }                                           \
  namespace cuda {                            \
  Status name(const Args&, const Execution&); \
  }
