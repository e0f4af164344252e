// The Python module's transposition of bytes.
#include "diptych/transpose.h"

#include "families.h"
#include "program.h"

namespace diptych::bind {

void add_transpose(py::module_& m) {
  m.def(
      "transpose",
      [](Operand x, Operand out) {
        Call call;
        run(transpose, TransposeArgs{call.in(x, "x"), call.out(out, "out")}, call);
      },
      py::arg("x"), py::arg("out"));
}

}  // namespace diptych::bind
