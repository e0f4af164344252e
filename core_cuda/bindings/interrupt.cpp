#include "interrupt.h"

#include <pybind11/pybind11.h>

#include <atomic>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace py = pybind11;

namespace diptych::bind {
namespace {

std::atomic<unsigned long> main_thread{0};

bool raised() {
  const py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

}  // namespace

void find_main_thread() {
  main_thread = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
#if defined(__unix__) || defined(__APPLE__)
  pthread_atfork(nullptr, nullptr, [] { main_thread = PyThread_get_thread_ident(); });  // the child's only thread
#endif
}

cpu::Interruptible::Ask signals_of_this_thread() {
  return PyThread_get_thread_ident() == main_thread.load(std::memory_order_relaxed) ? raised : nullptr;
}

}  // namespace diptych::bind
