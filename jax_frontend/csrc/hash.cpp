// The XLA handler of hash.
#include "diptych/hash.h"

#include "handler.h"

namespace diptych::xla_ffi {

// x -> out
Status run(Call& call, const HashAttributes&) {
  return call.each([&] { return hash({call.in(0), call.out(0)}, call.exec()); });
}

}  // namespace diptych::xla_ffi

DIPTYCH_HANDLERS(hash, HashAttributes);
