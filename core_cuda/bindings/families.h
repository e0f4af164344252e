// Functions that add each family's ops to the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace diptych::bind {

namespace py = pybind11;

void add_quantize(py::module_& m);
void add_scale_update(py::module_& m);
void add_gemm(py::module_& m);
void add_norm(py::module_& m);
void add_activation(py::module_& m);
void add_permute(py::module_& m);
void add_grouped(py::module_& m);
void add_transpose(py::module_& m);
void add_hash(py::module_& m);
void add_statistics(py::module_& m);
void add_tables(py::module_& m);  // the tables of formats, dtypes, options and kernels

}  // namespace diptych::bind
