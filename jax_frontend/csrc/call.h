// XLA's buffers as the core's views, one batch element at a time.
#pragma once

#include "attributes.h"
#include "diptych/ops.h"

namespace diptych::xla_ffi {

namespace ffi = ::xla::ffi;

inline constexpr int kMaxBatchRank = 8;  // `axes` has this many bits for each operand
inline constexpr int kMaxBuffers = 8;

// A buffer's view at batch element 0, and the stride in bytes of each batch axis (outermost first).
struct Operand {
  TensorView view;
  int64_t step[kMaxBatchRank] = {};
};

// The operands and results of one call. Reads dimensions and element types only: XLA's own byte counts are wrong for
// elements below a byte.
class Call {
 public:
  template <typename Attributes>
  Status open(const Attributes& d, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
              const Execution& exec) {
    if constexpr (requires { Attributes::kRank; }) max_rank_ = Attributes::kRank;
    if constexpr (requires { Attributes::kBytes; }) bytes_ = Attributes::kBytes;
    return open(d.version, d.batch_rank, d.axes, d.batched_results(), args, rets, exec);
  }

  const Execution& exec() const { return exec_; }
  // Views at the current batch element; beyond the last buffer absent ones, which the core's checks refuse.
  TensorView in(int i) const { return i < operands_ ? at(in_[i]) : TensorView{}; }
  TensorView out(int i) const { return i < results_ ? at(out_[i]) : TensorView{}; }

  // Runs `body` once per batch element, in row-major order, until one fails.
  template <typename Body>
  Status each(Body&& body) {
    int64_t count = 1;
    for (int a = 0; a < batch_rank_; ++a) count *= sizes_[a];
    for (int64_t i = 0; i < count; ++i) {
      int64_t rest = i;
      for (int a = batch_rank_ - 1; a >= 0; --a) {
        index_[a] = rest % sizes_[a];
        rest /= sizes_[a];
      }
      DIPTYCH_TRY(body());
    }
    return {};
  }

 private:
  Status open(int32_t version, int32_t batch_rank, int64_t axes, int batched_results, const ffi::RemainingArgs& args,
              const ffi::RemainingRets& rets, const Execution& exec);
  Status read(const ffi::AnyBuffer& buffer, bool operand, int i, int64_t axes, Operand* out) const;
  TensorView at(const Operand& operand) const;

  Execution exec_;
  int batch_rank_ = 0, operands_ = 0, results_ = 0;
  int max_rank_ = 2;    // of views; more dimensions fold into the last but one
  bool bytes_ = false;  // operands are read as bytes
  int64_t sizes_[kMaxBatchRank] = {}, index_[kMaxBatchRank] = {};
  Operand in_[kMaxBuffers], out_[kMaxBuffers];
};

inline ffi::Error to_error(const Status& status) {
  switch (status.code()) {
    case Code::ok:
      return ffi::Error::Success();
    case Code::value:
    case Code::shape:
    case Code::device:
    case Code::type:
    case Code::argument:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, status.message());
    case Code::unsupported:
      return ffi::Error(ffi::ErrorCode::kUnimplemented, status.message());
    case Code::runtime:
    case Code::interrupted:
      break;
  }
  return ffi::Error(ffi::ErrorCode::kInternal, status.message());
}

}  // namespace diptych::xla_ffi
