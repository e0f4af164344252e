// The versions that this library was compiled with. Python reads them before it registers handlers.
#include "attributes.h"

extern "C" const char* diptych_jax_headers() { return DIPTYCH_JAXLIB_VERSION; }
extern "C" int diptych_jax_ffi_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }
extern "C" int diptych_jax_attributes_version() { return diptych::xla_ffi::kAttributesVersion; }
