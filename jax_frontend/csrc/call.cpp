#include "call.h"

#include <algorithm>
#include <string>

namespace diptych::xla_ffi {
namespace {

bool to_dtype(ffi::DataType type, DType* out) {
  switch (type) {
    case ffi::F32:
      *out = DType::f32;
      return true;
    case ffi::F16:
      *out = DType::f16;
      return true;
    case ffi::BF16:
      *out = DType::bf16;
      return true;
    case ffi::F8E4M3FN:
      *out = DType::e4m3;
      return true;
    case ffi::F8E5M2:
      *out = DType::e5m2;
      return true;
    case ffi::F8E8M0FNU:
      *out = DType::e8m0;
      return true;
    case ffi::F64:
      *out = DType::f64;
      return true;
    case ffi::PRED:  // a byte that is 0 or 1
    case ffi::U8:
      *out = DType::u8;
      return true;
    case ffi::S32:
      *out = DType::i32;
      return true;
    case ffi::S64:
      *out = DType::i64;
      return true;
    default:
      return false;
  }
}

// The bytes of an element; 0 where elements are no whole bytes, or the type is unknown here.
int64_t width(ffi::DataType type) {
  switch (type) {
    case ffi::PRED:
    case ffi::S8:
    case ffi::U8:
    case ffi::F8E4M3FN:
    case ffi::F8E5M2:
    case ffi::F8E8M0FNU:
    case ffi::DataType::F8E3M4:
    case ffi::DataType::F8E4M3:
    case ffi::DataType::F8E4M3B11FNUZ:
    case ffi::DataType::F8E4M3FNUZ:
    case ffi::DataType::F8E5M2FNUZ:
      return 1;
    case ffi::S16:
    case ffi::U16:
    case ffi::F16:
    case ffi::BF16:
      return 2;
    case ffi::S32:
    case ffi::U32:
    case ffi::F32:
      return 4;
    case ffi::S64:
    case ffi::U64:
    case ffi::F64:
    case ffi::C64:
      return 8;
    case ffi::C128:
      return 16;
    default:
      return 0;
  }
}

}  // namespace

Status Call::open(int32_t version, int32_t batch_rank, int64_t axes, int batched_results,
                  const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, const Execution& exec) {
  if (version != kAttributesVersion)
    return {Code::value, "attributes of version " + std::to_string(version) + " reached handlers of version " +
                             std::to_string(kAttributesVersion) + "; reinstall diptych, or export the program again"};
  if (batch_rank < 0 || batch_rank > kMaxBatchRank)
    return {Code::value,
            "batch rank " + std::to_string(batch_rank) + " is outside 0.." + std::to_string(kMaxBatchRank)};
  if (args.size() > kMaxBuffers || rets.size() == 0 || rets.size() > kMaxBuffers)
    return {Code::value, "unexpected number of buffers: " + std::to_string(args.size()) + " operands, " +
                             std::to_string(rets.size()) + " results"};
  exec_ = exec;
  batch_rank_ = batch_rank;
  operands_ = static_cast<int>(args.size());
  results_ = static_cast<int>(rets.size());
  // Every result but a workspace has all batch axes, so the first result gives their lengths.
  auto first = rets.get<ffi::AnyBuffer>(0);
  if (!first.has_value()) return {Code::runtime, first.error().message()};
  const auto dims = (*first)->dimensions();
  if (static_cast<int>(dims.size()) < batch_rank) return {Code::value, "result 0 lacks its batch axes"};
  for (int a = 0; a < batch_rank; ++a) sizes_[a] = dims[a];
  for (int i = 0; i < operands_; ++i) {
    const auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return {Code::runtime, buffer.error().message()};
    DIPTYCH_TRY(read(*buffer, true, i, axes >> (8 * i) & 0xff, &in_[i]));
  }
  for (int i = 0; i < results_; ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return {Code::runtime, buffer.error().message()};
    DIPTYCH_TRY(read(**buffer, false, i, i < batched_results ? 0xff : 0, &out_[i]));
  }
  return {};
}

Status Call::read(const ffi::AnyBuffer& buffer, bool operand, int i, int64_t axes, Operand* out) const {
  const std::string who = (operand ? "operand " : "result ") + std::to_string(i);
  const bool raw = bytes_ && operand;
  const int64_t size = raw ? width(buffer.element_type()) : 1;
  TensorView& v = out->view;
  if (raw) v.dtype = DType::u8;
  if (raw ? size == 0 : !to_dtype(buffer.element_type(), &v.dtype))
    return {Code::type, who + " has XLA element type " + std::to_string(static_cast<int>(buffer.element_type())) +
                            ", which no op takes"};
  v.data = buffer.untyped_data();
  v.device = exec_.device;
  const auto dims = buffer.dimensions();
  int taken = 0;
  for (int a = 0; a < batch_rank_; ++a) {
    if ((axes >> (batch_rank_ - 1 - a) & 1) == 0) continue;
    if (taken >= static_cast<int>(dims.size()) || dims[taken] != sizes_[a])
      return {Code::value, who + " lacks batch axis " + std::to_string(a) + " of length " + std::to_string(sizes_[a])};
    out->step[a] = 1;  // marks the axis as present, until the element's size is known
    ++taken;
  }
  // Leading dimensions fold into rows; a stack keeps its first one.
  const int rank = static_cast<int>(dims.size()) - taken;
  v.rank = std::min(rank, max_rank_);
  for (int d = 0; d < v.rank; ++d) v.shape[d] = 1;
  for (int d = 0; d < rank; ++d) v.shape[d == rank - 1 ? v.rank - 1 : std::min(d, v.rank - 2)] *= dims[taken + d];
  if (raw) v.shape[0] = v.numel() * size, v.rank = 1;
  int64_t step = v.numel() * bytes(v.dtype);
  for (int a = batch_rank_ - 1; a >= 0; --a) {
    if (out->step[a] == 0) continue;
    out->step[a] = step;
    step *= sizes_[a];
  }
  return {};
}

TensorView Call::at(const Operand& operand) const {
  TensorView v = operand.view;
  int64_t offset = 0;
  for (int a = 0; a < batch_rank_; ++a) offset += index_[a] * operand.step[a];
  if (v.data != nullptr) v.data = v.as<char>() + offset;
  return v;
}

}  // namespace diptych::xla_ffi
