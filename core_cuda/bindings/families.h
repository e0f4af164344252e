// Functions that add each family's ops to the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace diptych::bind {

namespace py = pybind11;

#define FAMILY(name) void add_##name(py::module_& m);
#include "families.def"
void add_tables(py::module_& m);  // the tables of formats, dtypes, options and kernels

}  // namespace diptych::bind
