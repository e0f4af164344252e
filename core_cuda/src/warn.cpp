#include "diptych/warn.h"

#include <cstdio>
#include <mutex>
#include <set>

namespace diptych {
namespace {

thread_local WarningCollector* innermost = nullptr;

bool first_time(const std::string& message) {
  static std::mutex mutex;
  static auto* seen = new std::set<std::string>;  // never destroyed: threads may outlive main
  const std::lock_guard lock(mutex);
  return seen->insert(message).second;
}

}  // namespace

void warn_once(const std::string& message) {
  if (!first_time(message)) return;
  if (innermost != nullptr) {
    innermost->messages_.push_back(message);
  } else {
    std::fprintf(stderr, "diptych: warning: %s\n", message.c_str());
  }
}

WarningCollector::WarningCollector() : outer_(innermost) { innermost = this; }
WarningCollector::~WarningCollector() { innermost = outer_; }

}  // namespace diptych
