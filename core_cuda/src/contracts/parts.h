// The pieces that contracts are made of. Each checks one property and returns the error if it does not hold.
#pragma once

#include <initializer_list>

#include "contracts/contracts.h"

namespace diptych::contract {

std::string shape_text(const int64_t* shape, int rank);  // "[4, 8]"
std::string shape_text(std::initializer_list<int64_t> shape);

// The tensor is given, on the op's device, dense, and aligned to its element size.
Status present(const char* op, const char* arg, const TensorView&, const Device&);
Status high_precision(const char* op, const char* arg, const TensorView&);
Status of_dtype(const char* op, const char* arg, const TensorView&, DType);
Status of_numel(const char* op, const char* arg, const TensorView&, int64_t n);
Status of_shape(const char* op, const char* arg, const TensorView&, int64_t rows, int64_t cols);
Status ranked(const char* op, const char* arg, const TensorView&);
// The tensor is present and has the dtype and n elements.
Status holds(const char* op, const char* arg, const TensorView&, DType, int64_t n, const Device&);
Status floats(const char* op, const char* arg, const TensorView&, int64_t n, const Device&);  // holds n float32
Status apart(const char* op, const char* out_name, const TensorView& out, const char* in_name, const TensorView& in);
// The tensors of an op's arguments that are given, with their roles.
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
  fields(const_cast<Args&>(args), add);  // `fields` takes mutable arguments, since programs change them
  return o;
}
// Outputs share no memory with inputs or other outputs.
Status all_apart(const char* op, const Operands&, const char* output = "an output", const char* input = "an input");
Status row_map(const char* op, const TensorView&, const Device&);                    // [T, slots] int32
Status row_source(const char* op, const TensorView&, const Device&);                 // [rows] int32
Status absent(const char* op, const char* arg, const TensorView&, const char* why);  // the tensor is not given
Status known(const char* op, FormatId);
// A single copy, as products and dequantize read it: its data gives the tensor's extents, and its scales and amax must
// match them.
Status lone_copy(const char* op, const char* arg, const QuantizedView&, const Device&);
// Both operands reduce over equally many elements.
Status same_depth(const char* op, const QuantizedView& a, const QuantizedView& b);
// D, C, alpha and beta of a product whose result is [rows, cols].
Status result(const char* op, const TensorView& d, const TensorView& c, int64_t rows, int64_t cols, float alpha,
              float beta, const Device&);
// The formats of both operands support the options.
Status options(const char* op, const GemmOptions&, const QuantizedView& a, const QuantizedView& b);
// On CUDA, the workspace has at least `need` bytes, is 16-byte aligned and overlaps no other operand.
Status workspace(const char* op, const TensorView&, int64_t need, const Device&, const Operands&);

// The source's kind and operands fit x, and `outs` do not overlap the operands that it reads.
Status source(const char* op, const TensorView& x, const Source&, const Device&,
              std::initializer_list<const TensorView*> outs);

// High-precision tensors. folded: [rows, cols] after folding; vector: n elements; input: at least one dimension.
Status folded(const char* op, const char* arg, const TensorView&, int64_t rows, int64_t cols, const Device&);
Status vector(const char* op, const char* arg, const TensorView&, int64_t n, const Device&);
Status input(const char* op, const TensorView& x, const Device&);
// rsigma is given; mu is given for layernorm only, and beta (or its gradient) is allowed for layernorm only.
Status statistics(const char* op, Norm, const TensorView& mu, const TensorView& rsigma, int64_t m,
                  const char* beta_name, const TensorView& beta, const Device&);
Status activation_kind(const char* op, Activation, const TensorView& x, bool gated);

}  // namespace diptych::contract
