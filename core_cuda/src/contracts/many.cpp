// Contracts of ops on many tensors: each call is valid alone, and none touches what another one writes.
#include "diptych/many.h"

#include <algorithm>
#include <string>

#include "contracts/parts.h"

namespace diptych {

using namespace contract;

namespace {

// Memory that one of the calls uses.
struct Span {
  const char *begin, *end;
  size_t call;
  bool written;
};

// No call touches memory that another one writes. All spans are compared in the order of their addresses, so that the
// check of hundreds of tensors takes microseconds.
template <typename Args>
Status independent(const char* op, const Many<Args>& a) {
  std::vector<Span> spans;
  for (size_t i = 0; i < a.each.size(); ++i) {
    fields(const_cast<Args&>(a.each[i]), [&](TensorView& t, Role role = Role::input) {
      if (!t.given() || t.numel() == 0) return;
      const char* begin = t.as<const char>();
      spans.push_back({begin, begin + t.numel() * bytes(t.dtype), i, role != Role::input});
    });
  }
  std::sort(spans.begin(), spans.end(), [](const Span& x, const Span& y) { return x.begin < y.begin; });
  for (size_t i = 0; i < spans.size(); ++i) {
    for (size_t j = i + 1; j < spans.size() && spans[j].begin < spans[i].end; ++j) {
      const auto [first, last] = std::minmax(spans[i].call, spans[j].call);
      if (first != last && (spans[i].written || spans[j].written))
        return {Code::value, std::string(op) + ": calls " + std::to_string(first) + " and " + std::to_string(last) +
                                 " share memory that one of them writes"};
    }
  }
  return {};
}

template <typename Args>
Status check_each(const char* op, const Many<Args>& a, const Device& device) {
  if (a.each.empty()) return {Code::value, std::string(op) + ": give at least one call"};
  for (size_t i = 0; i < a.each.size(); ++i) {
    if (const Status s = check(a.each[i], device); !s.ok())
      return {s.code(), std::string(op) + ": call " + std::to_string(i) + ": " + s.message()};
  }
  return independent(op, a);
}

}  // namespace

Status check(const QuantizeManyArgs& a, const Device& device) {
  constexpr const char* op = "quantize_many";
  DIPTYCH_TRY(check_each(op, a, device));
  const QuantizeArgs& first = a.each.front();
  for (size_t i = 0; i < a.each.size(); ++i) {
    const QuantizeArgs& one = a.each[i];
    const auto refuse = [&](const char* why) {
      return Status(Code::value, std::string(op) + ": call " + std::to_string(i) + " " + why);
    };
    if (one.source.kind != SourceKind::plain || one.column_sum.given())
      return refuse("has a source or a column_sum; tensors are quantized as they are");
    const bool same = one.x.dtype == first.x.dtype && one.spec.format == first.spec.format &&
                      one.spec.flags == first.spec.flags && one.spec.eps == first.spec.eps &&
                      one.amax_mode == first.amax_mode && one.scale.given() == first.scale.given();
    if (!same) return refuse("differs from the first in dtype, format or options; make a call for each kind");
  }
  return {};
}

Status check(const ScaleUpdateManyArgs& a, const Device& device) { return check_each("scale_update_many", a, device); }

}  // namespace diptych
