// log_amax and scale_update: delayed scaling's update of histories of amaxes and of the scales that follow (NUMERICS
// 2).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "cpu/base/run.h"
#include "diptych/many.h"

namespace diptych::cpu {
namespace {

float next_scale(float amax, float top, float old) {
  if (!(amax > 0.0f && std::isfinite(amax))) return old;
  return std::min(top / amax, std::numeric_limits<float>::max());
}

// Updates one tensor. `to` may be `from`: each element is read before it is overwritten.
void update(const ScaleUpdateArgs& a, int64_t t, int64_t length, float top) {
  const float* from = a.history.as<const float>() + t * length;
  float* to = a.new_history.as<float>() + t * length;
  const float old = a.scale.as<const float>()[t];
  const float reduced = a.reduced.given() ? a.reduced.as<const float>()[t] : 0.0f;
  const float last = reduced != 0.0f ? reduced : from[0];
  if (last == 0.0f) {
    std::memmove(to, from, length * sizeof(float));
    a.new_scale.as<float>()[t] = old;
    return;
  }
  float amax = last;
  if (a.amax.given()) {
    amax = a.amax.as<const float>()[t];
  } else if (!a.most_recent) {
    for (int64_t i = 1; i < length; ++i) amax = std::fmax(amax, from[i]);  // fmax ignores NaN
  }
  std::memmove(to, from + 1, (length - 1) * sizeof(float));
  to[length - 1] = last;
  to[0] = 0.0f;  // in a history of one entry, this overwrites `last`
  a.new_scale.as<float>()[t] = next_scale(amax, top, old);
}

// Copies an input to its output, unless they are the same memory.
void keep(const TensorView& from, const TensorView& to) {
  if (to.data != from.data && from.numel() > 0) std::memcpy(to.data, from.data, from.numel() * sizeof(float));
}

// Checks a counter of a log. Counters come from memory that anybody may have written, so all are checked before any is
// used.
Status countable(const char* op, const char* arg, int64_t number, int64_t most) {
  if (number >= 0 && number <= most) return {};
  return {Code::value, std::string(op) + ": " + arg + " is " + std::to_string(number) +
                           ", and counts of logged amaxes lie in 0.." + std::to_string(most)};
}

Status takable(const AmaxLog& log, const TensorView& taken, int64_t n) {
  const int64_t written = *log.written.as<const int64_t>(), columns = log.amaxes.cols();
  DIPTYCH_TRY(countable("scale_update", "written", written, std::numeric_limits<int64_t>::max()));
  for (int64_t t = 0; t < n; ++t) {
    const int64_t from = taken.as<const int64_t>()[t];
    DIPTYCH_TRY(countable("scale_update", "taken", from, written));
    if (written - from > columns)
      return {Code::runtime, "scale_update: " + std::to_string(written - from) +
                                 " amaxes were logged since the last update, and the log holds " +
                                 std::to_string(columns)};
  }
  return {};
}

// Raises history[., 0] to the amaxes in pending and log.
Status take(const ScaleUpdateArgs& a) {
  const int64_t n = a.history.rows(), length = a.history.cols();
  if (a.log.given()) DIPTYCH_TRY(takable(a.log, a.taken, n));
  float* history = a.new_history.as<float>();
  for (int64_t t = 0; t < n && a.pending.given(); ++t) {
    float& cell = a.pending.as<float>()[t];
    history[t * length] = std::max(history[t * length], cell);
    cell = 0.0f;
  }
  for (int64_t t = 0; t < n && a.log.given(); ++t) {
    const int64_t columns = a.log.amaxes.cols(), written = *a.log.written.as<const int64_t>();
    int64_t& taken = a.taken.as<int64_t>()[t];
    for (; taken < written; ++taken)
      history[t * length] =
          std::max(history[t * length], a.log.amaxes.as<const float>()[t * columns + taken % columns]);
  }
  return {};
}

void copy_out(const ScaleUpdateArgs& a) {
  if (a.scale_out.given()) keep(a.new_scale, a.scale_out);
}

}  // namespace

Status log_amax(const LogAmaxArgs& args, const Execution&) {
  const int64_t n = args.amax.numel(), length = args.log.amaxes.cols();
  int64_t& written = *args.log.written.as<int64_t>();
  DIPTYCH_TRY(countable("log_amax", "written", written, std::numeric_limits<int64_t>::max() - 1));
  for (int64_t t = 0; t < n; ++t)
    args.log.amaxes.as<float>()[t * length + written % length] = args.amax.as<const float>()[t];
  ++written;
  return {};
}

Status scale_update(const ScaleUpdateArgs& args, const Execution&) {
  return guarded("scale_update", [&] {
    DIPTYCH_TRY(take(args));
    if (args.seen.given() && *args.seen.as<const int64_t>() == *args.step.as<const int64_t>()) {
      keep(args.history, args.new_history);
      keep(args.scale, args.new_scale);
      copy_out(args);
      return Status();
    }
    const int64_t n = args.history.rows(), length = args.history.cols();
    const float top = args.fp8_max * std::ldexp(1.0f, -args.margin);
    for_tasks(n, n * length >= kThreadedElements, [&](int64_t t) { update(args, t, length, top); });
    copy_out(args);
    return Status();
  });
}

Status scale_update_many(const ScaleUpdateManyArgs& args, const Execution& exec) {
  for (const ScaleUpdateArgs& one : args.each) DIPTYCH_TRY(cpu::scale_update(one, exec));
  return {};
}

}  // namespace diptych::cpu
