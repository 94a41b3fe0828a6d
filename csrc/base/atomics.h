// Memory order by name, for words that several processes share.
//
// "system" is the scope: the words lie in memory that every process of the host may map. The
// device primitives use the same names for the same orders.
#pragma once

#include <atomic>
#include <cstdint>

namespace fanfold {

template <typename T>
T load_relaxed_system(const T* word) {
  return std::atomic_ref<T>(*const_cast<T*>(word)).load(std::memory_order_relaxed);
}

template <typename T>
T load_acquire_system(const T* word) {
  return std::atomic_ref<T>(*const_cast<T*>(word)).load(std::memory_order_acquire);
}

template <typename T>
T load_sequential_system(const T* word) {
  return std::atomic_ref<T>(*const_cast<T*>(word)).load(std::memory_order_seq_cst);
}

template <typename T>
void store_release_system(T* word, T value) {
  std::atomic_ref<T>(*word).store(value, std::memory_order_release);
}

template <typename T>
T fetch_add_sequential_system(T* word, T value) {
  return std::atomic_ref<T>(*word).fetch_add(value, std::memory_order_seq_cst);
}

static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);
static_assert(std::atomic_ref<uint32_t>::is_always_lock_free);

}  // namespace fanfold
