// The kernel table's row and its lookup. The rows themselves stand in registry.cpp, the only file that names kernels.
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
  quantize_stack  // quantize of a stack by one kernel: not an op of its own
};
enum class Level : int32_t { native, emulated };

using FormatSet = uint64_t;  // bit i: row i of the format table
static_assert(kFormatCount <= 64);
constexpr FormatSet only(FormatId id) { return FormatSet{1} << static_cast<int32_t>(id); }

struct KernelRow {
  Op op;
  Backend backend;
  int min_arch;       // 80 for sm_80; 0 on the CPU
  FormatSet formats;  // every quantized operand's format must be in here
  Level level;
  const char* kernel;
  const char* note;                          // what the row asks beyond formats
  bool (*fits)(const void* args, int arch);  // null: nothing beyond formats
  Status (*run)(const void* args, const Execution&);
};

// One line of the table as `doctor` and tests read it.
struct RowInfo {
  std::string op, backend, level, kernel, note;
  bool conditional;  // on more than device and formats
  int min_arch;
  std::vector<std::string> formats;
  uint64_t calls;
};

// The first row that fits, run and counted; nothing where no row fits. `subject` says with what, where it warns.
std::optional<Status> run_first(Op op, FormatSet formats, const void* args, const Execution& exec,
                                std::string (*subject)(const void*));

// The error where no row fits: names op, formats, subject and the nearest rows.
Status miss(Op op, FormatSet formats, const Execution& exec, const std::string& subject);

// The row that would run: index into registry_table(), or -1.
int find_row(Op op, FormatSet formats, const void* args, const Device& device);

// A stack that one kernel takes, of checked arguments (dispatch.cpp); nothing: no kernel does.
std::optional<Status> quantize_together(const QuantizeArgs& stack, const Execution&);

std::vector<RowInfo> registry_table();
void reset_calls();
bool cuda_built();

}  // namespace diptych
