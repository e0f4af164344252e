// The Python module's statistics of a tensor's elements.
#include "diptych/statistics.h"

#include "families.h"
#include "program.h"

namespace diptych::bind {
namespace {

Numbers number_table() {
  Numbers d;
  for (const NumberRow& number : kNumbers) d[number.name] = static_cast<int32_t>(number.id);
  return d;
}

}  // namespace

void add_statistics(py::module_& m) {
  m.def(
      "statistics",
      [](Operand x, MaybeOperand result, MaybeOperand largest, Operand out, MaybeOperand workspace, int32_t number,
         float beyond) {
        Call call;
        run(statistics,
            StatisticsArgs{call.in(x, "x"), call.in(result, "result"), call.in(largest, "largest"),
                           call.out(out, "out"), call.out(workspace, "workspace"), static_cast<Number>(number), beyond},
            call);
      },
      py::arg("x"), py::arg("result"), py::arg("largest"), py::arg("out"), py::arg("workspace"), py::arg("number"),
      py::arg("beyond"));
  m.def("number_table", number_table, "The numbers by which `statistics` knows dtypes.");
  m.def("statistics_workspace_bytes", [] { return kStatisticsWorkspace; });
}

}  // namespace diptych::bind
