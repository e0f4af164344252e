// The op of diptych/grouped.h in the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace diptych::bind {

void add_grouped(pybind11::module_& m);

}  // namespace diptych::bind
