#include "cuda/gemm/cublaslt_library.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

#include "cuda/kernels.h"

namespace diptych::cuda {
namespace cublaslt {
namespace {

constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

std::mutex g_mutex;
std::atomic<const Api*> g_api{nullptr};
std::string g_path;       // set_cublaslt_path
bool g_searched = false;  // the file search has failed with this path
std::string g_why;

bool resolve(void* library, Api* api) {
  const auto find = [library](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (!function) g_why = std::string("it lacks ") + name;
    return function != nullptr;
  };
  return find(api->GetVersion, "cublasLtGetVersion") && find(api->Create, "cublasLtCreate") &&
         find(api->MatmulDescCreate, "cublasLtMatmulDescCreate") &&
         find(api->MatmulDescDestroy, "cublasLtMatmulDescDestroy") &&
         find(api->MatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute") &&
         find(api->MatrixLayoutCreate, "cublasLtMatrixLayoutCreate") &&
         find(api->MatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy") &&
         find(api->MatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate") &&
         find(api->MatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy") &&
         find(api->MatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute") &&
         find(api->MatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic") && find(api->Matmul, "cublasLtMatmul");
}

void* open_file(const char* name, int flags) {
  void* library = dlopen(name, flags);
  if (!library && !(flags & RTLD_NOLOAD)) {
    if (const char* error = dlerror()) g_why += (g_why.empty() ? "" : "; ") + std::string(error);
  }
  return library;
}

// Looks for a library that is loaded already, then at the path that was set, then along the loader's search path.
void* find_library() {
  for (const char* name : kNames) {
    if (void* library = open_file(name, RTLD_NOW | RTLD_NOLOAD)) return library;
  }
  if (g_searched) return nullptr;
  g_searched = true;
  g_why.clear();
  if (!g_path.empty()) {
    if (void* library = open_file(g_path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  }
  for (const char* name : kNames) {
    if (void* library = open_file(name, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return nullptr;
}

}  // namespace

const Api* open(std::string* why) {
  if (const Api* api = g_api.load(std::memory_order_acquire)) return api;
  const std::lock_guard lock(g_mutex);
  if (const Api* api = g_api.load(std::memory_order_relaxed)) return api;
  static Api api{};
  if (void* library = find_library()) {
    if (resolve(library, &api)) {
      g_api.store(&api, std::memory_order_release);
      return &api;
    }
    dlclose(library);
  }
  if (why) *why = g_why;
  return nullptr;
}

size_t version() {
  const Api* api = open(nullptr);
  return api ? api->GetVersion() : 0;
}

Status check(Result result, const char* what) {
  if (result == kSuccess) return {};
  return {Code::runtime, std::string("cuBLASLt: ") + what + " returned cublasStatus_t " + std::to_string(result)};
}

}  // namespace cublaslt

std::string cublaslt_version() {
  const size_t v = cublaslt::version();
  if (v == 0) return "";
  return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
}

void set_cublaslt_path(const char* path) {
  const std::lock_guard lock(cublaslt::g_mutex);
  cublaslt::g_path = path ? path : "";
  cublaslt::g_searched = false;
}

}  // namespace diptych::cuda
