// Stands in for cuda/ptx/signal.cuh. Thread blocks of one cluster see each other's stores at once.
#pragma once

#include "simulated.h"

namespace diptych::cuda::ptx {

inline uint32_t next_ticket(uint32_t* counter) { return (*counter)++; }
inline void publish(uint32_t* flag) { *flag = 1; }
inline bool published(const uint32_t* flag) {
  if (*flag == 0) simulated::leave();
  return *flag != 0;
}
inline void count_up(uint32_t* counter) { ++*counter; }
inline uint32_t counted(const uint32_t* counter) { return *counter; }
inline void engine_sees_memory() {}

}  // namespace diptych::cuda::ptx
