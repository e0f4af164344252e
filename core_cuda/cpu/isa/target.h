// A region that is compiled for more than the baseline instruction set. Include standard headers before it: their
// inline functions must not be compiled for instructions that the processor may lack.
#pragma once

#define DIPTYCH_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define DIPTYCH_TARGET_BEGIN(set) \
  DIPTYCH_PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define DIPTYCH_TARGET_END DIPTYCH_PRAGMA(clang attribute pop)
#else
#define DIPTYCH_TARGET_BEGIN(set) DIPTYCH_PRAGMA(GCC push_options) DIPTYCH_PRAGMA(GCC target(set))
#define DIPTYCH_TARGET_END DIPTYCH_PRAGMA(GCC pop_options)
#endif
