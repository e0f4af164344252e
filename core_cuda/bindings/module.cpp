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

struct BuildInfo {};
struct CudaInfo {
  std::vector<int> archs;
  std::string cublaslt;
};

template <>
struct Record<BuildInfo> {
  static constexpr auto name = py::detail::const_name("BuildInfo");
  template <typename F>
  static void entries(const BuildInfo&, F&& f) {
    f("cuda", cuda_built()), f("compiler", __VERSION__), f("isa", cpu::isa());
    f("cuda_toolkit", DIPTYCH_CUDA_VERSION), f("cuda_archs", DIPTYCH_CUDA_ARCHS);
  }
};

template <>
struct Record<CudaInfo> {
  static constexpr auto name = py::detail::const_name("CudaInfo");
  template <typename F>
  static void entries(const CudaInfo& c, F&& f) {
    f("archs", c.archs), f("cublaslt", c.cublaslt);
  }
};

namespace {

CudaInfo cuda_info() {  // initializes the CUDA driver, which importing does not
  CudaInfo info;
#ifdef DIPTYCH_WITH_CUDA
  for (int i = 0; i < cuda::device_count(); ++i) info.archs.push_back(cuda::arch(i));
  info.cublaslt = cuda::cublaslt_version();
#endif
  return info;
}

Numbers dlpack_layout() {  // a test compares it with the header that torch ships
  Numbers d;
  d["sizeof_tensor"] = sizeof(dl::Tensor);
  d["sizeof_api"] = sizeof(dl::ExchangeApi);
  d["tensor_from_object"] = offsetof(dl::ExchangeApi, tensor_from_object);
  d["current_work_stream"] = offsetof(dl::ExchangeApi, current_work_stream);
  return d;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  find_main_thread();
  m.doc() =
      "diptych's kernels on borrowed tensors. The caller allocates outputs.\n\n"
      "An Operand is a tensor: an object with a DLPack C exchange table, or a pair (buffer, dtype code).";
  m.attr("Operand") = py::module_::import("typing").attr("Any");
  add_record<BuildInfo>(m);
  add_record<CudaInfo>(m);
#define FAMILY(name) add_##name(m);
#include "families.def"
  add_tables(m);
  py::class_<Program, std::shared_ptr<Program>>(
      m, "Program",
      "Records the core's ops between start() and stop(), and runs them again on other tensors of the same forms.")
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
  m.def("build_info", [] { return BuildInfo(); });
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
