// Atomic accesses with their memory order in the name, for words that several processes share.
//
// "system" is the scope: every process of the host may map the memory of these words. The device
// primitives use the same names for the same orders.
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
void store_relaxed_system(T* word, T value) {
  std::atomic_ref<T>(*word).store(value, std::memory_order_relaxed);
}

template <typename T>
void store_release_system(T* word, T value) {
  std::atomic_ref<T>(*word).store(value, std::memory_order_release);
}

// Two words beside each other, on 16 bytes. Each store releases; a reader may see either word
// first.
inline void store_pair_release_system(uint64_t* words, uint64_t first, uint64_t second) {
  store_release_system(words + 1, second);
  store_release_system(words, first);
}

template <typename T>
T fetch_add_relaxed_system(T* word, T value) {
  return std::atomic_ref<T>(*word).fetch_add(value, std::memory_order_relaxed);
}

// Stores `desired` if the word is `expected`, and returns whether it was. If not, sets `expected`
// to the word.
template <typename T>
bool compare_exchange_relaxed_system(T* word, T& expected, T desired) {
  return std::atomic_ref<T>(*word).compare_exchange_strong(
      expected, desired, std::memory_order_relaxed, std::memory_order_relaxed);
}

template <typename T>
T fetch_add_sequential_system(T* word, T value) {
  return std::atomic_ref<T>(*word).fetch_add(value, std::memory_order_seq_cst);
}

static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);
static_assert(std::atomic_ref<uint32_t>::is_always_lock_free);

}  // namespace fanfold
