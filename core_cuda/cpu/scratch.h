// Per-thread working memory that grows, is reused by the next call, and is given back when it was unusually large.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace diptych::cpu {

enum class Slot { tile, bytes, scales, panels, packed, count_ };

class Scratch {
 public:
  ~Scratch() { std::free(p_); }

  // At least n elements of T, 64-byte aligned, of undefined value. Whatever the slot held before is gone.
  template <typename T>
  T* get(size_t n) {
    const size_t want = (n * sizeof(T) + 127) / 64 * 64;
    if (want > size_) {
      std::free(p_);
      size_ = 0;
      p_ = std::aligned_alloc(64, want);
      if (!p_) throw std::bad_alloc();
      size_ = want;
    }
    return static_cast<T*>(p_);
  }
  void trim(size_t keep) {
    if (size_ <= keep) return;
    std::free(p_);
    p_ = nullptr;
    size_ = 0;
  }

 private:
  void* p_ = nullptr;
  size_t size_ = 0;
};

inline Scratch& scratch(Slot slot) {
  static thread_local Scratch slots[static_cast<int>(Slot::count_)];
  return slots[static_cast<int>(slot)];
}

}  // namespace diptych::cpu
