#include "cpu/base/pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "cpu/base/interrupt.h"

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace diptych::cpu {
namespace {

constexpr int kSpins = 2000;  // tens of microseconds, so that back-to-back ops find the workers awake

#if defined(__x86_64__) || defined(__i386__)
constexpr uint64_t kIeee = 0x1F80;  // all exceptions masked, round to nearest, no FTZ, no DAZ
constexpr uint64_t kSticky = 0x3F;  // exception flags, which do not affect results
uint64_t float_control() { return _mm_getcsr(); }
void set_float_control(uint64_t v) { _mm_setcsr(static_cast<unsigned>(v)); }
void relax() { _mm_pause(); }
#elif defined(__aarch64__)
constexpr uint64_t kIeee = 0;
constexpr uint64_t kSticky = 0;
uint64_t float_control() {
  uint64_t v;
  asm volatile("mrs %0, fpcr" : "=r"(v));
  return v;
}
void set_float_control(uint64_t v) { asm volatile("msr fpcr, %0" : : "r"(v)); }
void relax() { asm volatile("yield"); }
#else
#error "diptych: name this processor's float control register here, or its results will depend on the caller's"
#endif

struct Job {
  const std::function<void(int64_t)>* task;
  int64_t count;
  int seats;  // helpers that may still join; guarded by the pool's mutex
  Job* next = nullptr;
  std::atomic<int64_t> cursor{0};
  std::atomic<int> helpers{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error = nullptr;

  void fail() {  // call it in a catch block; the first exception of a job is kept
    if (!failed.exchange(true)) error = std::current_exception();
    cursor.store(count, std::memory_order_relaxed);
  }
};

thread_local bool inside_task = false;

void work_on(Job& job) {
  const bool outer = inside_task;
  inside_task = true;
  {
    const IeeeScope ieee;
    const Shared shared(job.failed);
    try {
      for (int64_t i; (i = job.cursor.fetch_add(1, std::memory_order_relaxed)) < job.count;) {
        (*job.task)(i);
        poll();
      }
    } catch (...) {
      job.fail();
    }
  }
  inside_task = outer;
}

class Pool {
 public:
  void run(Job& job) {
    {
      std::lock_guard lock(mutex_);
      start_workers(job.seats);
      job.next = jobs_;
      jobs_ = &job;
      posted_.fetch_add(1, std::memory_order_release);
      for (int i = std::min(job.seats, asleep_); i > 0; --i) wake_.notify_one();
    }
    work_on(job);
    {
      std::lock_guard lock(mutex_);
      Job** at = &jobs_;
      while (*at != &job) at = &(*at)->next;
      *at = job.next;
    }
    for (int i = 0; i < kSpins && job.helpers.load(std::memory_order_acquire) != 0; ++i) relax();
    std::unique_lock lock(mutex_);  // with the lock, the last helper has released the job
    const auto done = [&] { return job.helpers.load(std::memory_order_acquire) == 0; };
    while (!done_.wait_for(lock, std::chrono::milliseconds(50), done)) {
      if (job.failed.load(std::memory_order_relaxed)) continue;  // after a failure `ask` is not called again
      lock.unlock();
      try {
        poll();
      } catch (...) {
        job.fail();
      }
      lock.lock();
    }
  }

  // Wakes sleeping workers, so that surplus ones end.
  void shrink() {
    const std::lock_guard lock(mutex_);
    wake_.notify_all();
  }

 private:
  void start_workers(int wanted) {
    while (workers_ < wanted && !exhausted_) {
      try {
        std::thread([this] { loop(); }).detach();
        ++workers_;
      } catch (const std::system_error& e) {
        exhausted_ = true;
        std::fprintf(stderr, "diptych: could not start worker thread %d (%s); continuing with fewer\n", workers_ + 1,
                     e.what());
      }
    }
  }

  Job* join() {  // under the mutex
    for (Job* job = jobs_; job; job = job->next) {
      if (job->seats > 0 && job->cursor.load(std::memory_order_relaxed) < job->count) {
        --job->seats;
        job->helpers.fetch_add(1, std::memory_order_relaxed);
        return job;
      }
    }
    return nullptr;
  }

  void loop() {
    uint64_t seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && posted_.load(std::memory_order_acquire) == seen; ++i) relax();
      Job* job;
      {
        std::unique_lock lock(mutex_);
        while (!(job = join())) {
          if (workers_ >= num_threads()) {  // num_threads counts the caller too
            --workers_;
            return;
          }
          seen = posted_.load(std::memory_order_relaxed);
          ++asleep_;
          wake_.wait(lock);
          --asleep_;
        }
        seen = posted_.load(std::memory_order_relaxed);
      }
      work_on(*job);
      std::lock_guard lock(mutex_);
      if (job->helpers.fetch_sub(1, std::memory_order_release) == 1) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* jobs_ = nullptr;
  int workers_ = 0, asleep_ = 0;
  bool exhausted_ = false;
  std::atomic<uint64_t> posted_{0};
};

std::atomic<Pool*> current_pool{nullptr};

// A forked child has none of its parent's workers and may hold copies of locked mutexes: it leaves the old pool.
void forget_pool() {
  current_pool.store(nullptr, std::memory_order_relaxed);
  inside_task = false;
}

Pool& pool() {
#if defined(__unix__) || defined(__APPLE__)
  static const int hooked = pthread_atfork(nullptr, nullptr, forget_pool);
  if (hooked != 0) throw std::system_error(hooked, std::generic_category(), "pthread_atfork");
#endif
  Pool* p = current_pool.load(std::memory_order_acquire);
  if (!p) {
    Pool* fresh = new Pool;  // never destroyed: its workers outlive static destructors
    if (current_pool.compare_exchange_strong(p, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
  }
  return *p;
}

int machine_threads() {
  int n = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMaxThreads);
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) n = std::min(n, std::max(1, CPU_COUNT(&set)));
#endif
  return n;
}

std::atomic<int>& thread_count() {
  static std::atomic<int> n{machine_threads()};
  return n;
}

}  // namespace

void parallel_for(int64_t count, const std::function<void(int64_t)>& task) {
  const int threads = num_threads();
  if (count <= 1 || threads == 1 || inside_task) {
    IeeeScope ieee;
    for (int64_t i = 0; i < count; ++i) {
      if (i > 0) poll();
      task(i);
    }
    return;
  }
  Job job{&task, count, static_cast<int>(std::min<int64_t>(threads, count)) - 1};
  pool().run(job);
  if (job.error) std::rethrow_exception(job.error);
}

void set_num_threads(int n) {
  const int before = thread_count().exchange(std::clamp(n, 1, kMaxThreads), std::memory_order_relaxed);
  Pool* p = current_pool.load(std::memory_order_acquire);
  if (n < before && p) p->shrink();
}
int num_threads() { return thread_count().load(std::memory_order_relaxed); }

IeeeScope::IeeeScope() : saved_(float_control()) {
  if ((saved_ & ~kSticky) != kIeee) set_float_control(kIeee);
  asm volatile("" ::: "memory");  // no float operand is read before this point
}

IeeeScope::~IeeeScope() {
  asm volatile("" ::: "memory");
  if ((saved_ & ~kSticky) != kIeee) set_float_control(saved_);
}

}  // namespace diptych::cpu
