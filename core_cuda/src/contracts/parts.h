// The pieces that contracts are made of: what one argument must be.
#pragma once

#include <initializer_list>

#include "contracts/contracts.h"

namespace diptych::contract {

std::string shape_text(const int64_t* shape, int rank);  // "[4, 8]"
std::string shape_text(std::initializer_list<int64_t> shape);

// Present, on the op's device, dense, aligned to its element.
Status present(const char* op, const char* arg, const TensorView&, const Device&);
Status high_precision(const char* op, const char* arg, const TensorView&);
Status of_dtype(const char* op, const char* arg, const TensorView&, DType);
Status of_numel(const char* op, const char* arg, const TensorView&, int64_t n);
Status of_shape(const char* op, const char* arg, const TensorView&, int64_t rows, int64_t cols);
Status ranked(const char* op, const char* arg, const TensorView&);
// Present, of the dtype, n elements.
Status holds(const char* op, const char* arg, const TensorView&, DType, int64_t n, const Device&);
Status floats(const char* op, const char* arg, const TensorView&, int64_t n, const Device&);  // holds n float32
Status apart(const char* op, const char* out_name, const TensorView& out, const char* in_name, const TensorView& in);
// The tensors that were given, with their roles.
struct Operands {
  static constexpr int kMax = 24;
  struct {
    const TensorView* tensor;
    Role role;
  } all[kMax];
  int count = 0;
};
template <typename Args>
Operands operands(const Args& args) {
  Operands o;
  const auto add = [&](const TensorView& t, Role role = Role::input) {
    if (t.given()) o.all[o.count++] = {&t, role};
  };
  fields(const_cast<Args&>(args), add);  // `fields` is for programs too, which rewrite their arguments
  return o;
}
// Outputs share no memory with inputs or other outputs.
Status all_apart(const char* op, const Operands&, const char* output = "an output", const char* input = "an input");
Status row_map(const char* op, const TensorView&, const Device&);                    // [T, slots] int32
Status row_source(const char* op, const TensorView&, const Device&);                 // [rows] int32
Status absent(const char* op, const char* arg, const TensorView&, const char* why);  // not given
Status known(const char* op, FormatId);
// A copy that arrives alone: its tensor's extents follow from its own data, and what scales it comes with it.
Status lone_copy(const char* op, const char* arg, const QuantizedView&, const Device&);
Status same_depth(const char* op, const QuantizedView& a, const QuantizedView& b);  // both reduce over one length
// What a product writes, and what it adds to it.
Status result(const char* op, const TensorView& d, const TensorView& c, int64_t rows, int64_t cols, float alpha,
              float beta, const Device&);
// Options of a product, which its formats must know.
Status options(const char* op, const GemmOptions&, const QuantizedView& a, const QuantizedView& b);
// Scratch memory: large enough, 16-byte aligned, and no other operand's.
Status workspace(const char* op, const TensorView&, int64_t need, const Device&, const Operands&);

// What is encoded instead of x; `outs` are written and may not lie in what it reads.
Status source(const char* op, const TensorView& x, const Source&, const Device&,
              std::initializer_list<const TensorView*> outs);

// High-precision tensors: of any rank that is [rows, cols] when folded; of n elements; with at least one dimension.
Status folded(const char* op, const char* arg, const TensorView&, int64_t rows, int64_t cols, const Device&);
Status vector(const char* op, const char* arg, const TensorView&, int64_t n, const Device&);
Status input(const char* op, const TensorView& x, const Device&);
// mu belongs to layernorm, and so does beta (or its gradient).
Status statistics(const char* op, Norm, const TensorView& mu, const TensorView& rsigma, int64_t m,
                  const char* beta_name, const TensorView& beta, const Device&);
Status activation_kind(const char* op, Activation, const TensorView& x, bool gated);

}  // namespace diptych::contract
