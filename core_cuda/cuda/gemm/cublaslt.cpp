// FP8 products on the tensor cores through cuBLASLt: per-tensor scales from sm_89, 1x128 and 128x128 blocks on sm_90.
//
// cuBLASLt is column-major, so it computes D.T = op(B) op(A).T: its A is our b and its B is our a. Both are reduced
// over their contiguous axis, the only form that FP8 has before Blackwell. The algorithm depends on the Key alone:
// alignments and the workspace size are constants. Split-K partial sums stay in float32.
#include <compare>
#include <map>
#include <mutex>
#include <optional>

#include "cuda/base/device.h"
#include "cuda/gemm/cublaslt_library.h"
#include "cuda/gemm/finish.h"
#include "diptych/warn.h"

namespace diptych::cuda {
namespace {

using namespace cublaslt;  // NOLINT: the ABI's names

constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;  // what cuBLASLt may use, whatever the shape
constexpr int64_t kAlign = 16, kBase = 256;   // bytes: alignment of every matrix, of each part of the workspace
constexpr size_t kBlockScalesSince = 120900;  // cuBLASLt 12.9

// ---- the problem ----

struct Problem {
  int64_t m, n, k;
  bool a_e5m2, b_e5m2, block_scales;
  ScaleMode a_mode, b_mode;
};

bool contraction_last(const QuantizedView& q) {
  return !q.columnwise || row(q.format).columnwise == ColumnwiseLayout::transposed;
}

bool scale_mode(const FormatRow& f, ScaleMode* mode) {
  if (f.scale != DType::f32 || (f.element != DType::e4m3 && f.element != DType::e5m2)) return false;
  if (f.one_scale()) {
    *mode = ScaleMode::scalar_32f;
  } else if (f.block_cols == 128 && f.block_rows == 1) {
    *mode = ScaleMode::vec128_32f;
  } else if (f.block_cols == 128 && f.block_rows == 128) {
    *mode = ScaleMode::block128x128_32f;
  } else {
    return false;
  }
  return true;
}

// Returns whether cuBLASLt's documented rules allow these operands, and describes them in *p. Its heuristic may still
// refuse them.
bool describe(const GemmArgs& args, Problem* p) {
  const FormatRow &fa = row(args.a.format), &fb = row(args.b.format);
  if (!contraction_last(args.a) || !contraction_last(args.b)) return false;
  *p = {args.d.rows(),
        args.d.cols(),
        args.a.data.cols(),
        fa.element == DType::e5m2,
        fb.element == DType::e5m2,
        false,
        {},
        {}};
  if (!scale_mode(fa, &p->a_mode) || !scale_mode(fb, &p->b_mode)) return false;
  if (p->a_e5m2 && p->b_e5m2) return false;
  if (fa.one_scale() != fb.one_scale()) return false;
  p->block_scales = !fa.one_scale();
  if (p->block_scales) {
    if (args.options.fast_accum || p->m % 4 != 0) return false;
    if (p->a_mode == ScaleMode::block128x128_32f && p->b_mode == ScaleMode::block128x128_32f) return false;
  }
  if (p->m <= 0 || p->n <= 0 || p->k <= 0 || p->k % 16 != 0 || p->n % 16 != 0) return false;
  for (const TensorView* t : {&args.a.data, &args.b.data, &args.d, &args.bias, &args.c}) {
    if (t->given() && !aligned(t->data, kAlign)) return false;
  }
  return true;
}

cudaDataType cuda_type(DType d) {
  switch (d) {
    case DType::f32:
      return CUDA_R_32F;
    case DType::f16:
      return CUDA_R_16F;
    default:
      return CUDA_R_16BF;
  }
}

// ---- plans ----

struct Key {
  int device, sm_count;
  int64_t m, n, k;
  bool a_e5m2, b_e5m2, fast_accum, bias;
  ScaleMode a_mode, b_mode;
  DType out, bias_type;
  auto operator<=>(const Key&) const = default;
};

// The layouts of both operands and of D, and the algorithm. A plan is immutable once it is in the map, and never freed.
struct Plan {
  MatrixLayout a, b, d;
  Algo algo;
};

std::mutex g_mutex;                          // guards both maps; held for lookups and to make plans, not for products
std::map<int, Handle> g_handles;             // one per device
std::map<Key, std::optional<Plan>> g_plans;  // nullopt: cuBLASLt has no algorithm

// Creating a handle may allocate; inside a stream capture that is allowed only in the relaxed mode.
class RelaxedCapture {
 public:
  RelaxedCapture() { ok_ = cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess; }
  ~RelaxedCapture() {
    if (ok_) (void)cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  bool ok_ = false;
};

Status handle_of(const Api& api, int device, Handle* handle) {
  if (const auto it = g_handles.find(device); it != g_handles.end()) {
    *handle = it->second;
    return {};
  }
  const RelaxedCapture relaxed;
  DIPTYCH_TRY(check(api.Create(handle), "cublasLtCreate"));
  g_handles.emplace(device, *handle);
  return {};
}

// The operation descriptor of one call. Each call makes one, since it holds that call's pointers; that is cheap.
class Desc {
 public:
  explicit Desc(const Api& api) : api_(api) {
    status_ = check(api.MatmulDescCreate(&desc_, kCompute32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  }
  ~Desc() {
    if (desc_) api_.MatmulDescDestroy(desc_);
  }
  Desc(const Desc&) = delete;
  Desc& operator=(const Desc&) = delete;

  template <typename T>
  void set(DescAttr attr, const T& value) {
    if (!status_.ok()) return;
    const std::string what = "cublasLtMatmulDescSetAttribute(" + std::to_string(static_cast<int>(attr)) + ")";
    status_ = check(api_.MatmulDescSetAttribute(desc_, static_cast<int>(attr), &value, sizeof(value)), what.c_str());
  }
  MatmulDesc get() const { return desc_; }
  const Status& status() const { return status_; }

 private:
  const Api& api_;
  MatmulDesc desc_ = nullptr;
  Status status_;
};

void fill(Desc& desc, const Key& key, const void* a_scale, const void* b_scale, const void* bias) {
  desc.set(DescAttr::trans_a, kOpT);
  desc.set(DescAttr::trans_b, kOpN);
  desc.set(DescAttr::a_scale_pointer, b_scale);  // cuBLASLt's A is our b
  desc.set(DescAttr::b_scale_pointer, a_scale);
  if (key.a_mode != ScaleMode::scalar_32f) {  // scalar is the default, and older libraries have no modes
    desc.set(DescAttr::a_scale_mode, static_cast<int32_t>(key.b_mode));
    desc.set(DescAttr::b_scale_mode, static_cast<int32_t>(key.a_mode));
  }
  if (key.fast_accum) desc.set(DescAttr::fast_accum, int8_t{1});
  if (key.bias) {
    desc.set(DescAttr::epilogue, kEpilogueBias);
    desc.set(DescAttr::bias_data_type, static_cast<int32_t>(cuda_type(key.bias_type)));
    desc.set(DescAttr::bias_pointer, bias);
  }
}

Status make_plan(const Api& api, Handle handle, const Key& key, std::optional<Plan>* out) {
  Desc desc(api);
  // The heuristic reads no memory but needs pointers. They are constants, so that no address changes its answer.
  const void* somewhere = reinterpret_cast<const void*>(uintptr_t{1} << 20);
  fill(desc, key, somewhere, somewhere, somewhere);
  DIPTYCH_TRY(desc.status());
  const auto element = [](bool e5m2) { return e5m2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3; };
  Plan plan{};
  DIPTYCH_TRY(check(api.MatrixLayoutCreate(&plan.a, element(key.b_e5m2), key.k, key.n, key.k), "layout of B"));
  DIPTYCH_TRY(check(api.MatrixLayoutCreate(&plan.b, element(key.a_e5m2), key.k, key.m, key.k), "layout of A"));
  DIPTYCH_TRY(check(api.MatrixLayoutCreate(&plan.d, cuda_type(key.out), key.n, key.m, key.n), "layout of D"));

  Preference preference = nullptr;
  DIPTYCH_TRY(check(api.MatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate"));
  Status status;
  const auto set = [&](PrefAttr attr, const auto& value) {
    if (!status.ok()) return;
    status = check(api.MatmulPreferenceSetAttribute(preference, static_cast<int>(attr), &value, sizeof(value)),
                   "cublasLtMatmulPreferenceSetAttribute");
  };
  set(PrefAttr::max_workspace_bytes, static_cast<uint64_t>(kWorkspaceBytes));
  set(PrefAttr::reduction_scheme_mask, kReductionComputeType);
  for (PrefAttr attr :
       {PrefAttr::min_alignment_a, PrefAttr::min_alignment_b, PrefAttr::min_alignment_c, PrefAttr::min_alignment_d}) {
    set(attr, static_cast<uint32_t>(kAlign));
  }
  Heuristic found{};
  int count = 0;
  Result result = kSuccess;
  if (status.ok()) {
    result =
        api.MatmulAlgoGetHeuristic(handle, desc.get(), plan.a, plan.b, plan.d, plan.d, preference, 1, &found, &count);
  }
  api.MatmulPreferenceDestroy(preference);
  DIPTYCH_TRY(status);
  if (result != kSuccess || count == 0 || found.state != kSuccess ||
      found.workspace_bytes > static_cast<size_t>(kWorkspaceBytes)) {
    for (MatrixLayout layout : {plan.a, plan.b, plan.d}) api.MatrixLayoutDestroy(layout);
    out->reset();
    return {};
  }
  plan.algo = found.algo;
  *out = plan;
  return {};
}

// Finds the key's plan in the cache, or makes it; null where cuBLASLt has no algorithm. The device must be current.
Status find_plan(const Api& api, const Key& key, const Plan** plan, Handle* handle) {
  const std::lock_guard lock(g_mutex);
  DIPTYCH_TRY(handle_of(api, key.device, handle));
  auto it = g_plans.find(key);
  if (it == g_plans.end()) {
    const RelaxedCapture relaxed;
    std::optional<Plan> made;
    DIPTYCH_TRY(make_plan(api, *handle, key, &made));
    it = g_plans.emplace(key, made).first;  // std::map: pointers to its values stay valid
  }
  *plan = it->second ? &*it->second : nullptr;
  return {};
}

// Returns whether cuBLASLt's own epilogue can add this bias, by its table of types for FP8 kernels.
bool fused_bias(const GemmArgs& args, const Problem& p) {
  if (!args.bias.given() || args.beta != 0.0f || p.block_scales) return false;
  return args.d.dtype == DType::f16 ? args.bias.dtype == DType::f16 : args.bias.dtype == DType::bf16;
}

// How one call runs: as one cuBLASLt call where that computes all of D, else as a float32 product and our own epilogue.
struct Route {
  Key key;
  const Plan* plan = nullptr;
  Handle handle = nullptr;
  bool own_epilogue = false;
  bool acc_in_d = false;  // the float32 product is written to D itself
};

Status find_route(const Api& api, const GemmArgs& args, const Problem& p, Route* r) {
  const int device = args.d.device.index;
  const bool bias = args.bias.given(), beta = args.beta != 0.0f;
  r->key = {device,    device_info(device).sm_count, p.m,   p.n,      p.k,      p.a_e5m2,
            p.b_e5m2,  args.options.fast_accum,      false, p.a_mode, p.b_mode, args.d.dtype,
            DType::f32};
  if (fused_bias(args, p)) {
    Key fused = r->key;
    fused.bias = true, fused.bias_type = args.bias.dtype;
    DIPTYCH_TRY(find_plan(api, fused, &r->plan, &r->handle));
    if (r->plan) {
      r->key = fused;
      return {};
    }
  }
  r->own_epilogue = bias || beta;
  r->acc_in_d = r->own_epilogue && args.d.dtype == DType::f32 && !beta;
  if (r->own_epilogue) r->key.out = DType::f32;
  return find_plan(api, r->key, &r->plan, &r->handle);
}

std::string shape_text(const GemmArgs& args, const Problem& p) {
  return std::string(row(args.a.format).name) + " x " + row(args.b.format).name + ", M=" + std::to_string(p.m) +
         " N=" + std::to_string(p.n) + " K=" + std::to_string(p.k);
}

int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace

// 32 MiB for cuBLASLt; both operands' block scales, at most one float per 128 k and outer index; D in float32 if our
// own epilogue may have to follow; and 256 bytes for each part's alignment.
int64_t gemm_workspace_bytes(FormatId a, FormatId b, int64_t m, int64_t n, int64_t k, bool epilogue) {
  if (const int64_t decoded = decoded_workspace_bytes(a, b, m, n, k, 1, false)) return decoded;
  return kWorkspaceBytes + ceil_div(k, 128) * (m + n) * 4 + (epilogue ? m * n * 4 : 0) + 4 * kBase;
}

bool gemm_cublaslt_fits(const GemmArgs& args) {
  Problem p;
  if (!describe(args, &p)) return false;
  std::string why;
  const Api* api = open(&why);
  if (!api) {
    warn_once("cuBLASLt cannot be opened, so FP8 products run on other kernels, which may be slower: " + why);
    return false;
  }
  if (p.block_scales && api->GetVersion() < kBlockScalesSince) {
    warn_once("cuBLASLt " + cublaslt_version() + " has no block scales (12.9 has); another kernel runs instead");
    return false;
  }
  const DeviceScope scope(args.d.device.index);
  Route route;
  const Status status = scope.status().ok() ? find_route(*api, args, p, &route) : scope.status();
  if (status.ok() && route.plan) return true;
  warn_once("cuBLASLt " + cublaslt_version() + " has no algorithm for " + shape_text(args, p) +
            (status.ok() ? "" : " (" + status.message() + ")") + "; another kernel runs instead");
  return false;
}

Status gemm_cublaslt(const GemmArgs& args, const Execution& exec) {
  Problem p;
  std::string why;
  const Api* api = open(&why);
  if (!api) return {Code::runtime, "gemm: cuBLASLt cannot be opened: " + why};
  if (!describe(args, &p)) {
    return {Code::unsupported, "gemm: these operands do not suit cuBLASLt's FP8 kernels"};
  }
  Route route;
  DIPTYCH_TRY(find_route(*api, args, p, &route));
  if (!route.plan) return {Code::unsupported, "gemm: cuBLASLt has no algorithm for " + shape_text(args, p)};

  uintptr_t next = reinterpret_cast<uintptr_t>(args.workspace.data);
  const auto take = [&next](int64_t bytes) {
    next = static_cast<uintptr_t>(round_up(static_cast<int64_t>(next), kBase));
    void* part = reinterpret_cast<void*>(next);
    next += bytes;
    return part;
  };
  void* workspace = take(kWorkspaceBytes);

  const void* a_scale = args.a.scale_inv.data;
  const void* b_scale = args.b.scale_inv.data;
  if (p.block_scales) {
    ScaleLayoutJob jobs[2];
    const auto job = [&](ScaleMode mode, int64_t outer, const void* from) {
      const int64_t k_blocks = ceil_div(p.k, 128);
      const bool vector = mode == ScaleMode::vec128_32f;
      const int64_t blocks = vector ? outer : ceil_div(outer, 128);
      const int64_t k_stride = vector ? k_blocks : round_up(k_blocks, 4);
      void* to = take(blocks * k_stride * 4);
      return ScaleLayoutJob{
          static_cast<const float*>(from), static_cast<float*>(to), blocks, k_blocks, k_stride, vector};
    };
    jobs[0] = job(p.a_mode, p.m, a_scale), jobs[1] = job(p.b_mode, p.n, b_scale);
    DIPTYCH_TRY(lay_out_scales(jobs, exec));
    a_scale = jobs[0].to, b_scale = jobs[1].to;
  }

  void* product = args.d.data;
  if (route.own_epilogue && !route.acc_in_d) product = take(p.m * p.n * 4);
  Desc desc(*api);
  fill(desc, route.key, a_scale, b_scale, args.bias.data);
  DIPTYCH_TRY(desc.status());
  const float alpha = args.alpha, beta = 0.0f;
  DIPTYCH_TRY(check(api->Matmul(route.handle, desc.get(), &alpha, args.b.data.data, route.plan->a, args.a.data.data,
                                route.plan->b, &beta, product, route.plan->d, product, route.plan->d, &route.plan->algo,
                                workspace, kWorkspaceBytes, static_cast<cudaStream_t>(exec.stream)),
                    "cublasLtMatmul"));
  return route.own_epilogue ? finish_gemm(static_cast<const float*>(product), args, exec) : Status();
}

Status prepare(int device_index) {
  std::string why;
  const Api* api = open(&why);
  if (!api) return {Code::runtime, "cuBLASLt cannot be opened: " + why};
  const DeviceScope scope(device_index);
  DIPTYCH_TRY(scope.status());
  Handle handle = nullptr;
  const std::lock_guard lock(g_mutex);
  return handle_of(*api, device_index, &handle);
}

}  // namespace diptych::cuda
