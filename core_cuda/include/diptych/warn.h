// Warnings that an op ran differently from what the caller may expect, such as emulated.
#pragma once

#include <string>
#include <vector>

namespace diptych {

// Reports a message the first time that it occurs in this process: to this thread's innermost collector, or to stderr
// if there is none.
void warn_once(const std::string& message);

// Collects this thread's warnings while it lives, so that the caller can report them.
class WarningCollector {
 public:
  WarningCollector();
  ~WarningCollector();
  WarningCollector(const WarningCollector&) = delete;
  WarningCollector& operator=(const WarningCollector&) = delete;
  const std::vector<std::string>& messages() const { return messages_; }

 private:
  friend void warn_once(const std::string&);
  std::vector<std::string> messages_;
  WarningCollector* outer_;
};

}  // namespace diptych
