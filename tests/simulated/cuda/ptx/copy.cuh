// Stands in for cuda/ptx/copy.cuh.
#pragma once

#include "simulated.h"

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
inline void copy_async4(void* shared, const void* from, bool inside) { copy_async(shared, from, inside, 4); }

inline void bulk_commit() {
  simulated::Thread* t = simulated::self;
  for (auto& store : t->open_stores) {
    ++t->stores;
    simulated::engine.push_back([t, store = std::move(store)] {
      store();
      --t->stores;
    });
  }
  t->open_stores.clear();
}
inline void bulk_wait_read() {
  simulated::wait_until([t = simulated::self] { return t->stores == 0; });
}
inline void bulk_sees_stores() {}

}  // namespace diptych::cuda::ptx
