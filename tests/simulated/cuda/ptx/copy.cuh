// Stands in for cuda/ptx/copy.cuh.
#pragma once

#include "cuda/ptx/barrier.cuh"

namespace diptych::cuda::ptx {

inline void copy_async(void* shared, const void* from, bool inside, int bytes) {
  if (simulated::address(shared) % bytes != 0 || (inside && reinterpret_cast<uintptr_t>(from) % bytes != 0)) {
    simulated::fail("an unaligned copy");
  }
  simulated::self->copies.push_back([=] {
    if (inside) {
      std::memcpy(shared, from, bytes);
    } else {
      std::memset(shared, 0, bytes);
    }
  });
}
inline void copy_async16(void* shared, const void* from, bool inside) { copy_async(shared, from, inside, 16); }
inline void copy_async_wait() {
  simulated::wait_until([&copies = simulated::self->copies] { return copies.empty(); });
}
inline void copy_async4(void* shared, const void* from, bool inside) { copy_async(shared, from, inside, 4); }

constexpr bool kBulk = true;

inline void check_bulk(const void* global, const void* shared, int bytes) {
  const bool whole = reinterpret_cast<uintptr_t>(global) % 16 == 0 && bytes % 16 == 0 && bytes > 0;
  if (!whole || simulated::address(shared) % 16 != 0) simulated::fail("a bulk copy of no whole 16 bytes");
  simulated::address(static_cast<const unsigned char*>(shared) + bytes - 1);
}
inline void bulk_load_once(void* shared, const void* from, int bytes, uint64_t* barrier) {
  check_bulk(from, shared, bytes);
  simulated::engine.push_back([=, &b = own(barrier)] {
    std::memcpy(shared, from, bytes);
    simulated::count_bytes(b, bytes);
  });
}
inline void bulk_prefetch(const void*, int) {}
inline void bulk_store(void* to, const void* shared, int bytes) {
  check_bulk(to, shared, bytes);
  simulated::self->open_stores.push_back([=] { std::memcpy(to, shared, bytes); });
}
inline void bulk_commit() {
  simulated::Thread* t = simulated::self;
  int& left = t->stores.emplace_back(0);
  for (auto& store : t->open_stores) {
    ++left;
    (simulated::chance() % 2 ? simulated::engine : simulated::late).push_back([&left, store = std::move(store)] {
      store();
      --left;
    });
  }
  t->open_stores.clear();
}
template <int kLater = 0>
void bulk_wait_read() {
  simulated::wait_until([&groups = simulated::self->stores] {
    return std::all_of(groups.begin(), groups.end() - std::min<int64_t>(kLater, groups.size()),
                       [](int left) { return left == 0; });
  });
}
inline void bulk_sees_stores() {}

}  // namespace diptych::cuda::ptx
