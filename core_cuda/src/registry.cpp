// THE kernel table. Dispatch takes the first row that fits; order is preference.
#include "registry.h"

#include <array>
#include <atomic>

#include "cpu/kernels.h"
#include "diptych/warn.h"
#ifdef DIPTYCH_WITH_CUDA
#include "cuda/kernels.h"
#endif

namespace diptych {
namespace {

template <typename Pred>
constexpr FormatSet formats_where(Pred pred) {
  FormatSet set = 0;
  for (int32_t i = 0; i < kFormatCount; ++i)
    if (pred(kFormats[i])) set |= FormatSet{1} << i;
  return set;
}

constexpr FormatSet kAny = formats_where([](const FormatRow&) { return true; });
constexpr FormatSet kTwoLevel = formats_where([](const FormatRow& f) { return f.rule == ScaleRule::two_level; });
// The formats whose block shapes the gemm kernels support. A new block shape needs a kernel, not just a row.
constexpr FormatSet kGemm = formats_where([](const FormatRow& f) {
  return f.one_scale() || (f.block_cols == 128 && (f.block_rows == 1 || f.block_rows == 128)) ||
         (f.block_rows == 1 && (f.block_cols == 16 || f.block_cols == 32));
});
// A scale for each whole row of an operand, which the CPU's products apply to their sums.
constexpr FormatSet kRows = formats_where([](const FormatRow& f) { return f.block_rows == 1 && f.block_cols == 0; });

template <typename Args, Status (*fn)(const Args&, const Execution&)>
Status call(const void* args, const Execution& exec) {
  return fn(*static_cast<const Args*>(args), exec);
}

#ifdef DIPTYCH_WITH_CUDA
// The formats that the CUDA kernels of quantize support. A new layout needs a kernel, not just a row.
constexpr FormatSet kTiles = formats_where([](const FormatRow& f) {
  const bool block = f.block_cols == 128 && (f.block_rows == 1 || f.block_rows == 128);
  return f.scale == DType::f32 && f.columnwise == ColumnwiseLayout::transposed && (f.one_scale() || block);
});
constexpr FormatSet kOneScale = kTiles & formats_where([](const FormatRow& f) { return f.one_scale(); });
constexpr FormatSet kMxfp8 = formats_where([](const FormatRow& f) {
  return f.rule == ScaleRule::e8m0_ceil && f.block_rows == 1 && f.block_cols == 32 &&
         f.columnwise == ColumnwiseLayout::row_major;
});
constexpr FormatSet kNvfp4 = kTwoLevel & formats_where([](const FormatRow& f) {
                               return f.element == DType::e2m1 && f.scale == DType::e4m3 && f.block_rows == 1 &&
                                      f.block_cols == 16 && f.columnwise == ColumnwiseLayout::transposed;
                             });
// Formats whose scaled elements bfloat16 can hold, and per-tensor formats, which may be the other operand.
constexpr FormatSet kDecoded = kMxfp8 | kNvfp4 | kOneScale;
constexpr FormatSet kBlocks = kTiles & ~kOneScale;
constexpr FormatSet kSquareBlocks = kTiles & formats_where([](const FormatRow& f) { return f.block_rows > 1; });
constexpr Archs kHopper{90, 90};
template <typename Args, bool (*fn)(const Args&)>
bool fits(const void* args) {
  return fn(*static_cast<const Args*>(args));
}
bool not_float64(const UnpermuteArgs& a) { return a.x.dtype != DType::f64; }
bool not_float64(const UnpermuteGradArgs& a) { return a.dy.dtype != DType::f64; }
#endif

}  // namespace

// clang-format off
static const KernelRow kKernels[] = {
    // op            backend        archs formats   level            kernel             note / fits / run
    {Op::amax,       Backend::cpu, {}, kAny,      Level::native,   "cpu.amax",        "", nullptr, call<AmaxArgs, cpu::amax>},
    {Op::quantize,   Backend::cpu, {}, kAny & ~kTwoLevel, Level::native, "cpu.quantize", "", nullptr, call<QuantizeArgs, cpu::quantize>},
    {Op::quantize,   Backend::cpu, {}, kTwoLevel, Level::native,   "cpu.quantize_two_level", "", nullptr, call<QuantizeArgs, cpu::quantize_two_level>},
    {Op::log_amax, Backend::cpu, {}, kAny,      Level::native,   "cpu.log_amax", "", nullptr, call<LogAmaxArgs, cpu::log_amax>},
    {Op::scale_update, Backend::cpu, {}, kAny,      Level::native,   "cpu.scale_update", "", nullptr, call<ScaleUpdateArgs, cpu::scale_update>},
    {Op::quantize_many, Backend::cpu, {}, kAny, Level::native, "cpu.quantize_many", "by quantize one by one", nullptr, call<QuantizeManyArgs, quantize_each>},
    {Op::quantize_stack, Backend::cpu, {}, kAny, Level::native, "cpu.quantize_stack", "by quantize one by one", nullptr, call<QuantizeStackArgs, quantize_slices>},
    {Op::scale_update_many, Backend::cpu, {}, kAny, Level::native, "cpu.scale_update_many", "", nullptr, call<ScaleUpdateManyArgs, cpu::scale_update_many>},
    {Op::dequantize, Backend::cpu, {}, kAny,      Level::native,   "cpu.dequantize",  "", nullptr, call<DequantizeArgs, cpu::dequantize>},
    {Op::gemm,       Backend::cpu, {}, kGemm | kRows, Level::native, "cpu.gemm",        "float32 fma in increasing k", nullptr, call<GemmArgs, cpu::gemm>},
    {Op::bias_grad,  Backend::cpu, {}, kAny,      Level::native,   "cpu.bias_grad",   "", nullptr, call<BiasGradArgs, cpu::bias_grad>},
    {Op::norm, Backend::cpu, {}, kAny, Level::native, "cpu.norm", "", nullptr, call<NormArgs, cpu::norm>},
    {Op::norm_grad, Backend::cpu, {}, kAny, Level::native, "cpu.norm_grad", "", nullptr, call<NormGradArgs, cpu::norm_grad>},
    {Op::activation, Backend::cpu, {}, kAny, Level::native, "cpu.activation", "", nullptr, call<ActivationArgs, cpu::activation>},
    {Op::activation_grad, Backend::cpu, {}, kAny, Level::native, "cpu.activation_grad", "", nullptr, call<ActivationGradArgs, cpu::activation_grad>},
    {Op::permute_map, Backend::cpu, {}, kAny, Level::native, "cpu.permute_map", "", nullptr, call<PermuteMapArgs, cpu::permute_map>},
    {Op::chunk_map, Backend::cpu, {}, kAny, Level::native, "cpu.chunk_map", "", nullptr, call<ChunkMapArgs, cpu::chunk_map>},
    {Op::invert_map, Backend::cpu, {}, kAny, Level::native, "cpu.invert_map", "", nullptr, call<InvertMapArgs, cpu::invert_map>},
    {Op::permute, Backend::cpu, {}, kAny, Level::native, "cpu.permute", "", nullptr, call<PermuteArgs, cpu::permute>},
    {Op::permute_columns, Backend::cpu, {}, kAny, Level::native, "cpu.permute_columns", "", nullptr, call<PermuteColumnsArgs, cpu::permute_columns>},
    {Op::unpermute, Backend::cpu, {}, kAny, Level::native, "cpu.unpermute", "", nullptr, call<UnpermuteArgs, cpu::unpermute>},
    {Op::unpermute_grad, Backend::cpu, {}, kAny, Level::native, "cpu.unpermute_grad", "", nullptr, call<UnpermuteGradArgs, cpu::unpermute_grad>},
    {Op::transpose, Backend::cpu, {}, kAny, Level::native, "cpu.transpose", "", nullptr, call<TransposeArgs, cpu::transpose>},
    {Op::hash, Backend::cpu, {}, kAny, Level::native, "cpu.hash", "", nullptr, call<HashArgs, cpu::hash>},
    {Op::statistics, Backend::cpu, {}, kAny, Level::native, "cpu.statistics", "", nullptr, call<StatisticsArgs, cpu::statistics>},
    {Op::grouped_gemm, Backend::cpu, {}, kGemm | kRows, Level::native, "cpu.grouped_gemm", "float32 fma in increasing k, group by group", nullptr, call<GroupedGemmArgs, cpu::grouped_gemm>},
    {Op::grouped_bias_grad, Backend::cpu, {}, kAny, Level::native, "cpu.grouped_bias_grad", "", nullptr, call<GroupedBiasGradArgs, cpu::grouped_bias_grad>},
#ifdef DIPTYCH_WITH_CUDA
    {Op::amax,       Backend::cuda, {80}, kAny,      Level::native,   "cuda.amax",       "", nullptr, call<AmaxArgs, cuda::amax>},
    {Op::quantize,   Backend::cuda, {80}, kTiles | kMxfp8, Level::native, "cuda.quantize_permuted_rows", "permuted rows, a rowwise copy alone", fits<QuantizeArgs, cuda::quantize_permuted_rows_fits>, call<QuantizeArgs, cuda::prepared<cuda::quantize_permuted_rows>>},
    {Op::quantize,   Backend::cuda, {80}, kTiles | kMxfp8, Level::native, "cuda.quantize_permuted_both", "both copies of permuted rows of 16 bits an element, in blocks of one row", fits<QuantizeArgs, cuda::quantize_permuted_both_fits>, call<QuantizeArgs, cuda::prepared<cuda::quantize_permuted_both>>},
    {Op::quantize,   Backend::cuda, {80}, kTiles | kMxfp8, Level::native, "cuda.quantize_permuted_split", "both copies of permuted rows with scales of their own: rows here, columns by the row that fits", fits<QuantizeArgs, cuda::quantize_permuted_split_fits>, call<QuantizeArgs, cuda::prepared<cuda::quantize_permuted_split>>},
    {Op::quantize,   Backend::cuda, {80}, kMxfp8, Level::native, "cuda.quantize_mxfp8", "", nullptr, call<QuantizeArgs, cuda::prepared<cuda::quantize_mxfp8>>},
    {Op::quantize,   Backend::cuda, {80}, kNvfp4, Level::native, "cuda.quantize_nvfp4", "", nullptr, call<QuantizeArgs, cuda::prepared<cuda::quantize_nvfp4>>},
    {Op::quantize,   Backend::cuda, {80}, kOneScale, Level::native, "cuda.quantize_stream", "a rowwise copy of plain x", fits<QuantizeArgs, cuda::quantize_stream_fits>, call<QuantizeArgs, cuda::prepared<cuda::quantize_stream>>},
    {Op::quantize,   Backend::cuda, kHopper, kSquareBlocks, Level::native, "cuda.quantize_permuted_strips", "a rowwise copy of permuted rows in square blocks, each token's row wanted often", fits<QuantizeArgs, cuda::quantize_permuted_strips_fits>, call<QuantizeArgs, cuda::prepared<cuda::quantize_permuted_strips>>},
    {Op::quantize,   Backend::cuda, {80}, kTiles, Level::native, "cuda.quantize_tiles", "", nullptr, call<QuantizeArgs, cuda::prepared<cuda::quantize_tiles>>},
    {Op::log_amax, Backend::cuda, {80}, kAny,    Level::native,   "cuda.log_amax", "", nullptr, call<LogAmaxArgs, cuda::log_amax>},
    {Op::scale_update, Backend::cuda, {80}, kAny,    Level::native,   "cuda.scale_update", "", nullptr, call<ScaleUpdateArgs, cuda::scale_update>},
    {Op::quantize_many, Backend::cuda, {80}, kTiles | kMxfp8, Level::native, "cuda.quantize_many", "tensors that are not empty", fits<QuantizeManyArgs, cuda::quantize_many_fits>, call<QuantizeManyArgs, cuda::quantize_many>},
    {Op::quantize_many, Backend::cuda, {80}, kAny, Level::native, "cuda.quantize_each", "by quantize one by one", nullptr, call<QuantizeManyArgs, quantize_each>},
    {Op::quantize_stack, Backend::cuda, {80}, kTiles, Level::native, "cuda.quantize_stack", "tensors that are not empty", fits<QuantizeStackArgs, cuda::quantize_stack_fits>, call<QuantizeStackArgs, cuda::quantize_stack>},
    {Op::quantize_stack, Backend::cuda, {80}, kAny, Level::native, "cuda.quantize_slices", "by quantize one by one", nullptr, call<QuantizeStackArgs, quantize_slices>},
    {Op::scale_update_many, Backend::cuda, {80}, kAny, Level::native, "cuda.scale_update_many", "", nullptr, call<ScaleUpdateManyArgs, cuda::scale_update_many>},
    {Op::dequantize, Backend::cuda, {80}, kAny,      Level::native,   "cuda.dequantize", "", nullptr, call<DequantizeArgs, cuda::dequantize>},
    {Op::gemm,       Backend::cuda, kHopper, kTiles, Level::native,   "cuda.native",     "FP8 tensor cores of Hopper where they are faster than cuBLASLt: large products without fast accumulation", fits<GemmArgs, cuda::gemm_native_pays>, call<GemmArgs, cuda::gemm_native>},
    {Op::gemm,       Backend::cuda, {90}, kOneScale, Level::native,   "cuda.cublaslt",   "FP8 tensor cores; N and K in multiples of 16, operands 16-byte aligned, not E5M2 x E5M2", fits<GemmArgs, cuda::gemm_cublaslt_fits>, call<GemmArgs, cuda::gemm_cublaslt>},
    {Op::gemm,       Backend::cuda, kHopper, kBlocks, Level::native,   "cuda.cublaslt_blocks", "FP8 tensor cores of Hopper; N and K in multiples of 16, M of 4, operands 16-byte aligned, not E5M2 x E5M2, not 128x128 x 128x128", fits<GemmArgs, cuda::gemm_cublaslt_fits>, call<GemmArgs, cuda::gemm_cublaslt>},
    {Op::gemm,       Backend::cuda, kHopper, kTiles, Level::native,   "cuda.native_rest", "FP8 tensor cores of Hopper, what cuBLASLt does not take; K in multiples of 16, operands 16-byte aligned, both per-tensor or both of blocks", fits<GemmArgs, cuda::gemm_native_fits>, call<GemmArgs, cuda::gemm_native>},
    {Op::gemm,       Backend::cuda, kHopper, kDecoded,  Level::emulated, "cuda.decoded",    "sm_90, one operand or both of MXFP8 or NVFP4: decoded to bfloat16 in memory, bfloat16 tensor cores", fits<GemmArgs, cuda::gemm_decoded_fits>, call<GemmArgs, cuda::gemm_decoded>},
    {Op::gemm,       Backend::cuda, {80}, kGemm,     Level::emulated, "cuda.emulated",   "decoded to bfloat16, float32 accumulation; any extents", nullptr, call<GemmArgs, cuda::gemm_emulated>},
    {Op::bias_grad,  Backend::cuda, {80}, kAny,      Level::native,   "cuda.bias_grad",  "", nullptr, call<BiasGradArgs, cuda::bias_grad>},
    {Op::norm, Backend::cuda, {80}, kAny, Level::native, "cuda.norm", "", nullptr, call<NormArgs, cuda::norm>},
    {Op::norm_grad, Backend::cuda, {80}, kAny, Level::native, "cuda.norm_grad", "", nullptr, call<NormGradArgs, cuda::norm_grad>},
    {Op::activation, Backend::cuda, {80}, kAny, Level::native, "cuda.activation", "", nullptr, call<ActivationArgs, cuda::activation>},
    {Op::activation_grad, Backend::cuda, {80}, kAny, Level::native, "cuda.activation_grad", "", nullptr, call<ActivationGradArgs, cuda::activation_grad>},
    {Op::permute_map, Backend::cuda, {80}, kAny, Level::native, "cuda.permute_map", "", nullptr, call<PermuteMapArgs, cuda::permute_map>},
    {Op::chunk_map, Backend::cuda, {80}, kAny, Level::native, "cuda.chunk_map", "", nullptr, call<ChunkMapArgs, cuda::chunk_map>},
    {Op::invert_map, Backend::cuda, {80}, kAny, Level::native, "cuda.invert_map", "", nullptr, call<InvertMapArgs, cuda::invert_map>},
    {Op::permute, Backend::cuda, kHopper, kAny, Level::native, "cuda.permute_slices", "sm_90, rows of whole 16 bytes, much to move", fits<PermuteArgs, cuda::permute_slices_fits>, call<PermuteArgs, cuda::permute_slices>},
    {Op::permute, Backend::cuda, {80}, kAny, Level::native, "cuda.permute", "", nullptr, call<PermuteArgs, cuda::permute>},
    {Op::permute_columns, Backend::cuda, {80}, kAny, Level::native, "cuda.permute_columns", "", nullptr, call<PermuteColumnsArgs, cuda::permute_columns>},
    {Op::unpermute, Backend::cuda, {80}, kAny, Level::native, "cuda.unpermute", "not float64", fits<UnpermuteArgs, not_float64>, call<UnpermuteArgs, cuda::unpermute>},
    {Op::unpermute_grad, Backend::cuda, {80}, kAny, Level::native, "cuda.unpermute_grad", "not float64", fits<UnpermuteGradArgs, not_float64>, call<UnpermuteGradArgs, cuda::unpermute_grad>},
    {Op::transpose, Backend::cuda, {80}, kAny, Level::native, "cuda.transpose", "", nullptr, call<TransposeArgs, cuda::transpose>},
    {Op::hash, Backend::cuda, {80}, kAny, Level::native, "cuda.hash", "", nullptr, call<HashArgs, cuda::hash>},
    {Op::statistics, Backend::cuda, {80}, kAny, Level::native, "cuda.statistics", "", nullptr, call<StatisticsArgs, cuda::statistics>},
    {Op::grouped_gemm, Backend::cuda, kHopper, kTiles, Level::native, "cuda.grouped_native", "FP8 tensor cores of Hopper; K in multiples of 16 (depth: rows, groups in multiples of 32, with block scales of 128), rows of D in multiples of 16 bytes, operands 16-byte aligned, both per-tensor or both of blocks, at most 512 groups", fits<GroupedGemmArgs, cuda::grouped_gemm_native_fits>, call<GroupedGemmArgs, cuda::grouped_gemm_native>},
    {Op::grouped_gemm, Backend::cuda, kHopper, kDecoded, Level::emulated, "cuda.grouped_decoded", "sm_90, one operand or both of MXFP8 or NVFP4: decoded to bfloat16 in memory, bfloat16 tensor cores; depth: groups in multiples of 16; at most 512 groups", fits<GroupedGemmArgs, cuda::grouped_gemm_decoded_fits>, call<GroupedGemmArgs, cuda::grouped_gemm_decoded>},
    {Op::grouped_gemm, Backend::cuda, {80}, kGemm, Level::emulated, "cuda.grouped_emulated", "decoded to bfloat16, float32 accumulation; any extents and groups", nullptr, call<GroupedGemmArgs, cuda::grouped_gemm_emulated>},
    {Op::grouped_bias_grad, Backend::cuda, {80}, kAny, Level::native, "cuda.grouped_bias_grad", "", nullptr, call<GroupedBiasGradArgs, cuda::grouped_bias_grad>},
#endif
};
// clang-format on

namespace {

constexpr int kKernelCount = sizeof(kKernels) / sizeof(kKernels[0]);
std::array<std::atomic<uint64_t>, kKernelCount> calls;
std::array<std::atomic<bool>, kKernelCount> off;          // rows that find_row skips
std::array<std::atomic<FormatSet>, kKernelCount> warned;  // formats whose emulation was reported

const char* name(Op op) {
  constexpr const char* names[] = {
#define OP(name, ...) #name,
#include "diptych/ops.def"
  };
  return names[static_cast<int>(op)];
}

const char* name(Backend backend) { return backend == Backend::cpu ? "cpu" : "cuda"; }

std::vector<std::string> names(FormatSet set) {
  std::vector<std::string> out;
  for (int32_t i = 0; i < kFormatCount; ++i)
    if (set >> i & 1) out.emplace_back(kFormats[i].name);
  return out;
}

std::string join(const std::vector<std::string>& parts) {
  std::string out;
  for (const auto& part : parts) out += (out.empty() ? "" : ", ") + part;
  return out;
}

int arch_of([[maybe_unused]] const Device& device) {
#ifdef DIPTYCH_WITH_CUDA
  if (device.backend == Backend::cuda) return cuda::arch(device.index);
#endif
  return 0;
}

}  // namespace

Status miss(Op op, FormatSet formats, const Execution& exec, const std::string& subject) {
  if (exec.device.backend == Backend::cuda && !cuda_built())
    return {Code::unsupported,
            std::string(name(op)) +
                ": the tensors are on a GPU and this build has no CUDA backend; build with nvcc (DIPTYCH_CUDA=on)"};
  std::string near;
  for (const auto& r : kKernels) {
    if (r.op != op) continue;
    const char* later = r.backend == Backend::cpu ? ", CPU" : r.archs.last == Archs::kLater ? "+" : "";
    near += std::string(near.empty() ? "" : "; ") + r.kernel + " (sm_" + std::to_string(r.archs.first) + later + ": " +
            join(names(r.formats)) + ")";
  }
  const std::string where =
      exec.device.backend == Backend::cpu ? "the CPU" : "sm_" + std::to_string(arch_of(exec.device));
  return {Code::unsupported, std::string(name(op)) + ": no kernel on " + where + " for " + join(names(formats)) + ", " +
                                 subject + "; nearest: " + near};
}

int find_row(Op op, FormatSet formats, const void* args, const Device& device) {
  const int arch = arch_of(device);
  for (int i = 0; i < kKernelCount; ++i) {
    const KernelRow& r = kKernels[i];
    if (r.op == op && r.backend == device.backend && !off[i].load(std::memory_order_relaxed) && r.archs.has(arch) &&
        (formats & ~r.formats) == 0 && (r.fits == nullptr || r.fits(args)))
      return i;
  }
  return -1;
}

std::optional<Status> run_first(Op op, FormatSet formats, const void* args, const Execution& exec,
                                std::string (*subject)(const void*)) {
  const int i = find_row(op, formats, args, exec.device);
  if (i < 0) return std::nullopt;
  calls[i].fetch_add(1, std::memory_order_relaxed);
  if (kKernels[i].level == Level::emulated && (formats & ~warned[i].load(std::memory_order_relaxed)) != 0) {
    warned[i].fetch_or(formats, std::memory_order_relaxed);
    warn_once(std::string(name(op)) + " of " + join(names(formats)) + " runs emulated on sm_" +
              std::to_string(arch_of(exec.device)) + " (" + kKernels[i].kernel + ": " + kKernels[i].note +
              "), first with " + subject(args) + "; `diptych doctor` lists what runs natively");
  }
  return kKernels[i].run(args, exec);
}

bool runs_together(const QuantizeManyArgs& a, const Device& device) {
  const int i = find_row(Op::quantize_many, only(a.each.front().spec.format), &a, device);
  return i >= 0 && kKernels[i].run != call<QuantizeManyArgs, quantize_each>;
}

std::vector<RowInfo> registry_table() {
  std::vector<RowInfo> out;
  for (int i = 0; i < kKernelCount; ++i) {
    const KernelRow& r = kKernels[i];
    out.push_back({name(r.op), name(r.backend), r.level == Level::native ? "native" : "emulated", r.kernel, r.note,
                   r.fits != nullptr, r.archs.first, r.archs.last, names(r.formats),
                   calls[i].load(std::memory_order_relaxed)});
  }
  return out;
}

bool switch_kernel(const std::string& kernel, bool on) {
  bool found = false;
  for (int i = 0; i < kKernelCount; ++i) {
    if (kernel == kKernels[i].kernel) off[i].store(!on, std::memory_order_relaxed), found = true;
  }
  return found;
}

void reset_calls() {
  for (auto& c : calls) c.store(0, std::memory_order_relaxed);
}

bool cuda_built() {
#ifdef DIPTYCH_WITH_CUDA
  return true;
#else
  return false;
#endif
}

#ifdef DIPTYCH_WITH_CUDA
int64_t gemm_workspace_bytes(FormatId a, FormatId b, int64_t m, int64_t n, int64_t k, bool epilogue) {
  return cuda::gemm_workspace_bytes(a, b, m, n, k, epilogue);
}
int64_t grouped_gemm_workspace_bytes(FormatId a, FormatId b, GroupKind kind, int64_t m, int64_t n, int64_t k,
                                     int64_t groups) {
  return cuda::decoded_workspace_bytes(a, b, m, n, k, groups, kind == GroupKind::rows);
}
int64_t bias_grad_workspace_bytes(int64_t m, int64_t n) { return cuda::bias_grad_workspace_bytes(m, n); }
int64_t norm_grad_workspace_bytes(int64_t m, int64_t k) { return cuda::norm_grad_workspace_bytes(m, k); }
int64_t column_sum_workspace_bytes(int64_t m, int64_t k) { return cuda::column_sum_workspace_bytes(m, k); }
int64_t permute_map_workspace_bytes(RoutingMap kind, int64_t items, int64_t experts) {
  return cuda::permute_map_workspace_bytes(kind, items, experts);
}
int64_t grouped_bias_grad_workspace_bytes(int64_t rows, int64_t cols, int64_t groups) {
  return cuda::grouped_bias_grad_workspace_bytes(rows, cols, groups);
}
#else
int64_t gemm_workspace_bytes(FormatId, FormatId, int64_t, int64_t, int64_t, bool) { return 0; }
int64_t grouped_gemm_workspace_bytes(FormatId, FormatId, GroupKind, int64_t, int64_t, int64_t, int64_t) { return 0; }
int64_t bias_grad_workspace_bytes(int64_t, int64_t) { return 0; }
int64_t norm_grad_workspace_bytes(int64_t, int64_t) { return 0; }
int64_t column_sum_workspace_bytes(int64_t, int64_t) { return 0; }
int64_t permute_map_workspace_bytes(RoutingMap, int64_t, int64_t) { return 0; }
int64_t grouped_bias_grad_workspace_bytes(int64_t, int64_t, int64_t) { return 0; }
#endif

}  // namespace diptych
