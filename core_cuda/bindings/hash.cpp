// The Python module's hash of a tensor's bits.
#include "diptych/hash.h"

#include "families.h"
#include "program.h"

namespace diptych::bind {

void add_hash(py::module_& m) {
  m.def(
      "hash",
      [](Operand x, Operand out) {
        Call call;
        run(hash, HashArgs{call.in(x, "x"), call.out(out, "out")}, call);
      },
      py::arg("x"), py::arg("out"));
}

}  // namespace diptych::bind
