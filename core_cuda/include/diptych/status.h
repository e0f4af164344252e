// How an op reports failure: a code that maps to one Python exception, and a sentence.
#pragma once

#include <string>
#include <utility>

namespace diptych {

// The Python exception that each code becomes: shape ShapeError, device DeviceError, type DTypeError, argument
// ArgumentError and unsupported UnsupportedError, all of diptych.common.errors; value ValueError; runtime RuntimeError;
// interrupted the exception that a signal handler raised.
enum class Code { ok, value, shape, device, type, argument, unsupported, runtime, interrupted };

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  bool ok() const { return code_ == Code::ok; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::ok;
  std::string message_;
};

}  // namespace diptych

#define DIPTYCH_TRY(expr)                                   \
  do {                                                      \
    if (::diptych::Status s_ = (expr); !s_.ok()) return s_; \
  } while (0)
