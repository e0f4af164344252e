// Stands in for cuda/ptx/barrier.cuh.
#pragma once

#include "simulated.h"

namespace diptych::cuda::ptx {

inline uint32_t shared_address(const void* p) { return simulated::address(p); }

inline simulated::Barrier& own(uint64_t* barrier) {
  auto& declared = simulated::self->block->declared_barriers;
  if (const auto found = declared.find(barrier); found != declared.end()) return found->second;
  return simulated::barrier(simulated::self->block, simulated::address(barrier));
}
inline void barrier_init(uint64_t* barrier, int count) {
  simulated::Block* block = simulated::self->block;
  auto& made =
      simulated::inside(barrier) ? block->barriers[simulated::address(barrier)] : block->declared_barriers[barrier];
  made = {count, count, 0, 0};
}
inline void barrier_init_fence() {}
inline bool barrier_try(uint64_t* barrier, uint32_t parity) {
  if (simulated::chance() % 3 == 0) simulated::leave();
  return own(barrier).phase != parity;
}
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  simulated::wait_until([&b = own(barrier), parity] { return b.phase != parity; });
}
inline void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  own(barrier).bytes += bytes;
  simulated::arrive(own(barrier));
}
inline void barrier_arrive(uint64_t* barrier) { simulated::arrive(own(barrier)); }
constexpr uint32_t kRankBytes = 1u << 24;  // a remote address: of which thread block, and where in it
inline uint32_t remote_barrier(uint64_t* barrier, int rank) { return rank * kRankBytes + simulated::address(barrier); }
inline void remote_barrier_arrive(uint32_t barrier) {
  simulated::arrive(simulated::barrier(simulated::blocks[barrier / kRankBytes].get(), barrier % kRankBytes));
}
inline void barrier_arrive_after_copies(uint64_t* barrier) {
  simulated::self->copies.push_back([&b = own(barrier)] { simulated::arrive(b); });
}

inline int cluster_rank() { return simulated::self->block->rank; }
inline void cluster_sync() { simulated::meet(simulated::cluster, static_cast<int>(simulated::threads.size())); }
inline void named_sync(int id, int threads) { simulated::meet(simulated::self->block->named[id], threads); }

template <int kRegisters>
void take_registers() {}
template <int kRegisters>
void give_registers() {}

}  // namespace diptych::cuda::ptx
