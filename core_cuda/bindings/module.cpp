// The Python module: every op over borrowed tensors, and the tables behind them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/base/pool.h"
#include "cpu/kernels.h"
#include "families.h"
#include "interrupt.h"
#include "program.h"
#include "src/registry.h"
#ifdef DIPTYCH_WITH_CUDA
#include "cuda/kernels.h"
#endif

namespace diptych::bind {
namespace {

py::dict build_info() {
  py::dict d;
  d["cuda"] = cuda_built();
  d["compiler"] = __VERSION__;
  d["isa"] = cpu::isa();
  d["cuda_toolkit"] = DIPTYCH_CUDA_VERSION;
  d["cuda_archs"] = DIPTYCH_CUDA_ARCHS;
  return d;
}

py::dict cuda_info() {  // touches the driver, unlike importing
  py::dict d;
  py::list archs;
  std::string cublaslt;
#ifdef DIPTYCH_WITH_CUDA
  for (int i = 0; i < cuda::device_count(); ++i) archs.append(cuda::arch(i));
  cublaslt = cuda::cublaslt_version();
#endif
  d["archs"] = archs;
  d["cublaslt"] = cublaslt;
  return d;
}

py::dict dlpack_layout() {  // compared by a test with the header that torch ships
  py::dict d;
  d["sizeof_tensor"] = sizeof(dl::Tensor);
  d["sizeof_api"] = sizeof(dl::ExchangeApi);
  d["tensor_from_object"] = offsetof(dl::ExchangeApi, tensor_from_object);
  d["current_work_stream"] = offsetof(dl::ExchangeApi, current_work_stream);
  return d;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  find_main_thread();
  m.doc() = "diptych's kernels over borrowed tensors. Outputs are allocated by the caller.";
  add_quantize(m);
  add_scale_update(m);
  add_gemm(m);
  add_norm(m);
  add_activation(m);
  add_permute(m);
  add_grouped(m);
  add_tables(m);
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init<>())
      .def("start", &Program::start)
      .def("stop", &Program::stop)
      .def("seal", &Program::seal, py::arg("inputs"), py::arg("outputs"), py::arg("scratch"), py::arg("views"),
           py::arg("makers"), py::arg("make_workspace"))
      .def("run", &Program::run, py::arg("inputs"));
  m.def(
      "set_num_threads",
      [](int n) {
        if (n < 1 || n > cpu::kMaxThreads)
          throw py::value_error("set_num_threads: n must be at least 1 and at most " +
                                std::to_string(cpu::kMaxThreads) + ", got " + std::to_string(n));
        cpu::set_num_threads(n);
      },
      py::arg("n"));
  m.def("get_num_threads", cpu::num_threads);
  m.def(
      "set_isa",
      [](const std::string& name) {
        if (!cpu::set_isa(name.c_str()))
          throw py::value_error("set_isa: this machine has no '" + name + "'; choose avx512, avx2 or generic");
      },
      py::arg("name"));
  m.def("build_info", build_info);
  m.def("cuda_info", cuda_info);
  m.def(
      "set_cublaslt_path",
      [](const std::string& path) {
#ifdef DIPTYCH_WITH_CUDA
        cuda::set_cublaslt_path(path.c_str());
#else
        throw py::value_error("set_cublaslt_path: this build has no CUDA backend, so " + path + " would not be opened");
#endif
      },
      py::arg("path"));
  m.def("dlpack_layout", dlpack_layout);
}

}  // namespace diptych::bind
