// A cluster of thread blocks on the CPU, for kernels whose instructions all lie in cuda/ptx: the headers beside this
// one stand in for those, and the kernel's own source is compiled for the host.
//
// Every thread is a fiber and runs until it waits. Whatever the hardware does on its own time happens at a time drawn
// at random: boxes of the copy engine land in any order, copies of a thread in its own, and products read shared memory
// as late as they may, so that memory which is given back too early shows. What no thread can end is reported as a
// deadlock. Not simulated: the order of memory accesses between threads, banks, registers, time.
#pragma once

#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace simulated {

using Task = std::function<void()>;

// Of so many participants nobody goes on before all have come.
struct Meeting {
  int here = 0;
  uint64_t round = 0;
};

struct Barrier {
  int count = 0, pending = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
};

struct Warp {
  Meeting meeting;
  uint64_t values[2][32] = {};  // by the round's parity
};

struct Block {
  std::unique_ptr<unsigned char, decltype(&std::free)> shared{nullptr, &std::free};
  size_t bytes = 0;
  int index = 0, rank = 0;
  std::map<uint32_t, Barrier> barriers;              // by address
  std::map<const void*, Barrier> declared_barriers;  // in memory that the kernel declares, which has no address here
  std::vector<Warp> warps;
  Meeting named[16];
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block* block = nullptr;
  int index = 0;
  bool done = false;
  std::deque<Task> copies;          // of copy_async, in order
  std::vector<Task> open_products;  // of the batch that is not closed
  std::deque<std::vector<Task>> products;
  std::vector<Task> open_stores;
  std::deque<int> stores;  // of each group those that have not read shared memory yet
};

struct Fault {
  std::string what;
};

inline Thread* self = nullptr;
inline ucontext_t scheduler;
inline std::vector<std::unique_ptr<Block>> blocks;  // of the cluster
inline std::vector<std::unique_ptr<Thread>> threads;
inline std::vector<Task> engine;  // what the copy engine has not done yet
inline std::vector<Task> late;    // what it does as late as it may: half of its stores
inline std::mt19937 chance;
inline uint64_t progress = 0;
inline int grid = 0;
inline Meeting cluster;
inline Task kernel;
inline std::string fault;
inline int runs = 0;  // launches so far

inline void leave() { swapcontext(&self->context, &scheduler); }

// Ends the run. A thread stays where it is; between threads, where nothing may be left behind, this throws.
[[noreturn]] inline void fail(const std::string& what) {
  if (self == nullptr) throw Fault{what};
  fault = what + " (block " + std::to_string(self->block->index) + ", thread " + std::to_string(self->index) + ")";
  for (;;) leave();
}

template <typename F>
void wait_until(F&& ready) {
  while (!ready()) leave();
  ++progress;
}

inline void meet(Meeting& m, int participants) {
  const uint64_t round = m.round;
  if (++m.here == participants) {
    m.here = 0, ++m.round, ++progress;
  } else {
    wait_until([&] { return m.round != round; });
  }
}

// All of a warp's values.
inline const uint64_t* exchange(uint64_t value) {
  Warp& w = self->block->warps[self->index / 32];
  uint64_t* values = w.values[w.meeting.round % 2];
  values[self->index % 32] = value;
  meet(w.meeting, 32);
  return values;
}

// ---- shared memory: addresses of a block begin at kBase ----

constexpr uint32_t kBase = 1024;

inline bool inside(const void* p) {
  const auto at = static_cast<const unsigned char*>(p) - self->block->shared.get();
  return at >= 0 && static_cast<size_t>(at) < self->block->bytes;
}
inline uint32_t address(const void* p) {
  if (!inside(p)) fail("an address outside of shared memory");
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - self->block->shared.get()) + kBase;
}
inline unsigned char* memory(Block* block, uint32_t at) {
  if (at < kBase || at - kBase >= block->bytes) fail("an address outside of shared memory");
  return block->shared.get() + (at - kBase);
}

inline Barrier& barrier(Block* block, uint32_t at) {
  auto found = block->barriers.find(at);
  if (found == block->barriers.end()) fail("a barrier that was not initialized");
  return found->second;
}
inline void settle(Barrier& b) {
  if (b.pending < 0) fail("more arrivals than a barrier counts");
  if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.count, ++progress;
}
inline void arrive(Barrier& b) {
  --b.pending;
  settle(b);
}
inline void count_bytes(Barrier& b, int64_t n) {
  b.bytes -= n;
  settle(b);
}

// ---- running ----

inline void step_engine(std::vector<Task>& tasks) {
  if (tasks.empty()) return;
  std::swap(tasks[chance() % tasks.size()], tasks.back());
  Task task = std::move(tasks.back());
  tasks.pop_back();
  task();
  ++progress;
}

inline void enter() {
  kernel();
  self->done = true, ++progress;
  leave();
}

inline void start_cluster(int first, int size, int block_threads, size_t shared_bytes) {
  constexpr size_t kStack = 256 << 10;
  blocks.clear(), threads.clear(), engine.clear(), late.clear();
  cluster = {};
  for (int rank = 0; rank < size; ++rank) {
    auto& b = blocks.emplace_back(std::make_unique<Block>());
    b->bytes = (shared_bytes + kBase - 1) / kBase * kBase;
    b->shared.reset(static_cast<unsigned char*>(std::aligned_alloc(kBase, b->bytes)));
    std::memset(b->shared.get(), 0xE5, b->bytes);
    b->index = first + rank, b->rank = rank;
    b->warps.resize(block_threads / 32);
    for (int i = 0; i < block_threads; ++i) {
      auto& t = threads.emplace_back(std::make_unique<Thread>());
      t->block = b.get(), t->index = i, t->stack.reset(new char[kStack]);
      getcontext(&t->context);
      t->context.uc_stack.ss_sp = t->stack.get(), t->context.uc_stack.ss_size = kStack;
      makecontext(&t->context, enter, 0);
    }
  }
}

inline void run_cluster() {
  std::vector<Thread*> order;
  for (auto& t : threads) order.push_back(t.get());
  size_t alive = order.size();
  for (int idle = 0; alive > 0;) {
    const uint64_t before = progress;
    if (chance() % 4 == 0) std::shuffle(order.begin(), order.end(), chance);
    for (Thread* t : order) {
      if (t->done) continue;
      self = t;
      swapcontext(&scheduler, &t->context);
      self = nullptr;
      if (!fault.empty()) return;
      alive -= t->done;
      if (!t->copies.empty() && chance() % 2) {
        t->copies.front()();
        t->copies.pop_front(), ++progress;
      }
      if (chance() % 64 == 0) step_engine(engine);
    }
    if (progress == before) step_engine(engine.empty() ? late : engine);
    idle = progress == before ? idle + 1 : 0;
    if (idle > 100) fail("a deadlock");
  }
  for (auto& t : threads) {
    const bool stored = std::all_of(t->stores.begin(), t->stores.end(), [](int left) { return left == 0; });
    if (!stored || !t->open_stores.empty() || !t->products.empty() || !t->copies.empty())
      fail("a thread ended before what it had asked for");
  }
}

// Empty, or what went wrong.
inline std::string run(int grid_blocks, int cluster_size, int block_threads, size_t shared_bytes, Task task) {
  grid = grid_blocks, kernel = std::move(task);
  ++runs;
  fault.clear();
  try {
    for (int first = 0; first < grid_blocks && fault.empty(); first += cluster_size) {
      start_cluster(first, cluster_size, block_threads, shared_bytes);
      run_cluster();
    }
  } catch (const Fault& f) {
    fault = f.what;
  }
  return fault;
}

struct Index {
  unsigned x, y = 1;  // y: of a grid
};

// As the hardware has it: a signalling NaN gives way to a number too.
inline float larger(float a, float b) { return std::isnan(a) || a < b ? b : a; }

}  // namespace simulated

// ---- the language ----

#undef __global__
#undef __device__
#undef __shared__
#undef __forceinline__
#undef __grid_constant__
#undef __launch_bounds__
#undef __noinline__
#define __global__
#define __device__
#define __shared__ static  // one for all blocks: of clusters of one, which run one after the other
#define __noinline__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __CUDA_ARCH_FEAT_SM90_ALL
#define threadIdx (simulated::Index{static_cast<unsigned>(simulated::self->index)})
#define blockIdx (simulated::Index{static_cast<unsigned>(simulated::self->block->index)})
#define gridDim (simulated::Index{static_cast<unsigned>(simulated::grid)})

using std::max;
using std::min;

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= static_cast<unsigned>(both >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  return r;
}
template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
void __stcs(T* p, T v) {
  *p = v;
}
inline int atomicMax(int* p, int v) {
  const int before = *p;
  *p = std::max(before, v);
  return before;
}

inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) {
  const unsigned long long before = *p;
  *p += v;
  return before;
}

template <typename T>
T __shfl_sync(unsigned, T v, int from) {
  uint64_t bits = 0;
  std::memcpy(&bits, &v, sizeof(v));
  bits = simulated::exchange(bits)[from % 32];
  std::memcpy(&v, &bits, sizeof(v));
  return v;
}
template <typename T>
T __shfl_up_sync(unsigned lanes, T v, int step) {
  const int lane = simulated::self->index % 32;
  return __shfl_sync(lanes, v, lane >= step ? lane - step : lane);
}
template <typename T>
T __shfl_xor_sync(unsigned lanes, T v, int mask) {
  return __shfl_sync(lanes, v, (simulated::self->index % 32) ^ mask);
}
#define fmaxf simulated::larger
inline unsigned __ballot_sync(unsigned, bool yes) {
  const uint64_t* values = simulated::exchange(yes);
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= static_cast<unsigned>(values[i]) << i;
  return r;
}
inline unsigned __reduce_or_sync(unsigned, unsigned v) {
  const uint64_t* values = simulated::exchange(v);
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= static_cast<unsigned>(values[i]);
  return r;
}
inline bool __all_sync(unsigned lanes, bool yes) { return __ballot_sync(lanes, !yes) == 0; }
inline bool __any_sync(unsigned lanes, bool yes) { return __ballot_sync(lanes, yes) != 0; }
inline void __trap() { simulated::fail("a trap"); }
inline void __syncwarp() { simulated::exchange(0); }
inline void __syncthreads() {
  simulated::meet(simulated::self->block->named[0], static_cast<int>(simulated::threads.size()));
}
