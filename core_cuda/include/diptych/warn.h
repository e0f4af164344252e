// Warnings: something ran differently from what was asked, and nobody may miss it.
#pragma once

#include <string>
#include <vector>

namespace diptych {

// Reports a message the first time that it is seen in this process: to the innermost collector of this thread, or to
// stderr where there is none.
void warn_once(const std::string& message);

// Gathers this thread's warnings while it lives, for a caller with a better place for them.
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
