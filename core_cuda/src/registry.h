// The kernel table's row and its lookup. The rows are in registry.cpp, the only file that names kernels.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "diptych/ops.h"

namespace diptych {

enum class Op : int32_t {
#define OP(name, ...) name,
#include "diptych/ops.def"
};
enum class Level : int32_t { native, emulated };

using FormatSet = uint64_t;  // bit i: row i of the format table
static_assert(kFormatCount <= 64);
constexpr FormatSet only(FormatId id) { return FormatSet{1} << static_cast<int32_t>(id); }

// The architectures that run a kernel, from the oldest to the newest: 80 is sm_80, and the CPU is 0.
struct Archs {
  static constexpr int kLater = 999;  // all later ones run it
  int first = 0, last = kLater;

  bool has(int arch) const { return first <= arch && arch <= last; }
};

struct KernelRow {
  Op op;
  Backend backend;
  Archs archs;
  FormatSet formats;  // the set must contain the format of every quantized operand
  Level level;
  const char* kernel;
  const char* note;                // what the row requires beyond formats, in words
  bool (*fits)(const void* args);  // null: requires nothing beyond formats
  Status (*run)(const void* args, const Execution&);
};

// A row of the table in the form that `doctor` and tests read.
struct RowInfo {
  std::string op, backend, level, kernel, note;
  bool conditional;  // whether the row has a `fits`
  int min_arch, max_arch;
  std::vector<std::string> formats;
  uint64_t calls;
};

// Runs the first row that fits and counts the call; nullopt if no row fits. `subject` describes the operands for
// warnings.
std::optional<Status> run_first(Op op, FormatSet formats, const void* args, const Execution& exec,
                                std::string (*subject)(const void*));

// Returns the error for operands that no row fits. It names the op, the formats, the operands and all rows of the op.
Status miss(Op op, FormatSet formats, const Execution& exec, const std::string& subject);

// Returns the index in registry_table() of the row that would run, or -1.
int find_row(Op op, FormatSet formats, const void* args, const Device& device);

// Quantize tensors one by one, where no kernel takes them together. Defined in many.cpp.
Status quantize_each(const QuantizeManyArgs&, const Execution&);
Status quantize_slices(const QuantizeStackArgs&, const Execution&);

// Returns whether one kernel would run the calls; if not, they would run one by one.
bool runs_together(const QuantizeManyArgs&, const Device&);

std::vector<RowInfo> registry_table();

// Makes find_row skip the rows of a kernel, or no longer; returns false for a name that no row has. For comparing
// kernels only: which kernel runs decides the bits of a product, for the whole process.
bool switch_kernel(const std::string& kernel, bool on);
void reset_calls();
bool cuda_built();

}  // namespace diptych
