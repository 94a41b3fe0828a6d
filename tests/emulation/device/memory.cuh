// device/memory.cuh on a CPU. Reading what others write gives way to them.
#pragma once

#include "late.hpp"
#include "layout/types.h"

namespace fanfold {

template <class T>
T emulated_load(const T* address) {
  emulation::yield();
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
template <class T>
void emulated_store(T* address, T value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

inline uint4 load_relaxed_system(const uint4* address) {
  const auto* words = reinterpret_cast<const uint32_t*>(address);
  emulation::yield();
  uint32_t v[4];
  for (int i = 0; i < 4; ++i) v[i] = __atomic_load_n(words + i, __ATOMIC_ACQUIRE);
  return {v[0], v[1], v[2], v[3]};
}
inline uint64_t load_relaxed_system(const uint64_t* address) { return emulated_load(address); }
inline uint32_t load_relaxed_system(const uint32_t* address) { return emulated_load(address); }
inline uint64_t load_acquire_system(const uint64_t* address) { return emulated_load(address); }
inline uint32_t load_acquire_system(const uint32_t* address) { return emulated_load(address); }
inline void add_release_system(uint32_t* address, uint32_t v) {
  __atomic_fetch_add(address, v, __ATOMIC_ACQ_REL);
}
inline uint32_t load_acquire_gpu(const uint32_t* address) { return emulated_load(address); }
inline uint64_t load_acquire_gpu(const uint64_t* address) { return emulated_load(address); }
inline void store_release_gpu(uint64_t* address, uint64_t v) { emulated_store(address, v); }
inline uint32_t add_release_gpu(uint32_t* address, uint32_t v) {
  return __atomic_fetch_add(address, v, __ATOMIC_ACQ_REL);
}
inline uint32_t load_relaxed_gpu(const uint32_t* address) { return emulated_load(address); }

// Words one after the other, the last first: nothing may rely on their order.
inline void store_relaxed_system(uint4* address, uint4 v) {
  auto* words = reinterpret_cast<uint32_t*>(address);
  const uint32_t values[4] = {v.x, v.y, v.z, v.w};
  for (int i = 3; i >= 0; --i) emulated_store(words + i, values[i]);
}
inline void store_relaxed_system(uint64_t* address, uint64_t v) { emulated_store(address, v); }
inline void store_relaxed_system(uint32_t* address, uint32_t v) { emulated_store(address, v); }
inline void store_release_system(uint64_t* address, uint64_t v) { emulated_store(address, v); }
// The second word first, and others run in between: nothing may rely on their order.
inline void store_pair_release_system(uint64_t* words, uint64_t first, uint64_t second) {
  emulated_store(words + 1, second);
  emulation::yield();
  emulated_store(words, first);
}
inline uint64_t fetch_add_relaxed_system(uint64_t* address, uint64_t v) {
  return __atomic_fetch_add(address, v, __ATOMIC_RELAXED);
}
inline bool compare_exchange_relaxed_system(uint64_t* address, uint64_t& expected,
                                            uint64_t desired) {
  emulation::yield();
  return __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_RELAXED,
                                     __ATOMIC_RELAXED);
}
inline uint64_t exchange_acquire_gpu(uint64_t* address, uint64_t v) {
  emulation::yield();
  return __atomic_exchange_n(address, v, __ATOMIC_ACQ_REL);
}
inline void store_relaxed_gpu(uint32_t* address, uint32_t v) { emulated_store(address, v); }
inline void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// ---- of this CTA, in its shared memory ----------------------------------------------------------

// The dynamic shared memory of a kernel that names places in it by their addresses (kernel.cpp).
inline thread_local unsigned char* emulated_shared = nullptr;

inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(shared) - emulated_shared);
}
inline float load_shared_float(uint32_t address) {
  return *reinterpret_cast<const float*>(emulated_shared + address);
}
inline void load_shared_floats(float (&v)[2], uint32_t address) {
  for (int i = 0; i < 2; ++i) v[i] = load_shared_float(address + i * sizeof(float));
}
inline void store_shared_pair(uint32_t address, uint16_t v) {
  *reinterpret_cast<uint16_t*>(emulated_shared + address) = v;
}
inline uint32_t load_relaxed_cta(const uint32_t* shared) { return *shared; }
inline void store_relaxed_cta(uint32_t* shared, uint32_t v) { *shared = v; }
inline uint32_t exchange_acquire_cta(uint32_t* shared, uint32_t v) {
  emulation::yield();
  const uint32_t before = *shared;
  *shared = v;
  return before;
}
inline bool fill_release_cta(uint32_t* shared, uint32_t v) {
  emulation::yield();
  if (*shared != 0) return false;
  *shared = v;
  return true;
}

// Copies to shared memory come as late as they may; until then noise stands there.
inline void copy_async_or_zeros(uint4* shared, const uint4* global, bool copies) {
  *shared = uint4{0x7fc17fc1u, 0x7fc17fc1u, 0x7fc17fc1u, 0x7fc17fc1u};
  emulation::copy_late(shared, copies ? global : nullptr);
}
inline void commit_copies() { emulation::commit_copies(); }
template <int Youngest>
void await_copies() {
  emulation::yield();
  emulation::await_copies(Youngest);
}

inline void store_weak(uint4* address, uint4 v) { store_relaxed_system(address, v); }
inline uint4 load_once(const uint4* address) { return *address; }
inline uint4 load_published(const uint4* address) { return *address; }

}  // namespace fanfold
