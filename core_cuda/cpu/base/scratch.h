// Per-thread scratch memory. It grows, is reused by the next call, and is freed if it was unusually large.
#pragma once

#include <array>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

namespace diptych::cpu {

enum class Slot { tile, bytes, scales, row_scales, panels, packed, count_ };

class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { std::free(p_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Returns at least n elements of T, 64-byte aligned and uninitialized. The slot's earlier content is lost.
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
  void swap(Scratch& other) {
    std::swap(p_, other.p_);
    std::swap(size_, other.size_);
  }

 private:
  void* p_ = nullptr;
  size_t size_ = 0;
};

using ScratchSlots = std::array<Scratch, static_cast<size_t>(Slot::count_)>;

inline ScratchSlots& scratch_slots() {
  static thread_local ScratchSlots slots;
  return slots;
}

inline Scratch& scratch(Slot slot) { return scratch_slots()[static_cast<size_t>(slot)]; }

// Swaps this thread's scratch memory with `other`.
inline void exchange_scratch(ScratchSlots& other) {
  for (size_t i = 0; i < other.size(); ++i) scratch_slots()[i].swap(other[i]);
}

}  // namespace diptych::cpu
