// device/bulk.cuh on a CPU. Loads are done when they are asked for, stores as late as they may be.
#pragma once

#include <bit>
#include <cstdlib>
#include <cstring>

#include "device/warp.cuh"
#include "late.hpp"
#include "layout/types.h"

namespace fanfold {

inline constexpr bool kHasBulkCopies = true;

inline void fence_shared_before_bulk() {}
inline void fence_global_and_bulk() {}
inline void fence_barrier_init() {}

// As large as on a GPU. The other CTAs of a cluster, which are other threads of the operating system,
// change it too.
struct alignas(8) ArrivalBarrier {
  struct Counts {
    int32_t bytes;    // expected and not come
    int8_t arrivals;  // of a phase
    int8_t missing;   // of this one
    uint16_t phase;
  };
  uint64_t word;

  Counts look() const { return std::bit_cast<Counts>(__atomic_load_n(&word, __ATOMIC_ACQUIRE)); }

  template <class Change>
  void change(const Change& change) {
    uint64_t before = __atomic_load_n(&word, __ATOMIC_RELAXED);
    uint64_t after;
    do {
      auto counts = std::bit_cast<Counts>(before);
      change(counts);
      if (counts.missing == 0 && counts.bytes == 0) {
        counts.missing = counts.arrivals;
        ++counts.phase;
      }
      after = std::bit_cast<uint64_t>(counts);
    } while (!__atomic_compare_exchange_n(&word, &before, after, false, __ATOMIC_ACQ_REL,
                                          __ATOMIC_RELAXED));
  }
};

static_assert(sizeof(ArrivalBarrier) == 8);

inline void init_barrier(ArrivalBarrier* barrier, uint32_t arrivals) {
  const auto count = static_cast<int8_t>(arrivals);
  barrier->word = std::bit_cast<uint64_t>(ArrivalBarrier::Counts{0, count, count, 0});
}
inline void arrive(ArrivalBarrier* barrier) {
  barrier->change([](ArrivalBarrier::Counts& counts) { --counts.missing; });
}
inline void expect(ArrivalBarrier* barrier, uint32_t bytes) {
  barrier->change(
      [&](ArrivalBarrier::Counts& counts) { counts.bytes += static_cast<int32_t>(bytes); });
}
inline void arrive_expecting(ArrivalBarrier* barrier, uint32_t bytes) {
  barrier->change([&](ArrivalBarrier::Counts& counts) {
    counts.bytes += static_cast<int32_t>(bytes);
    --counts.missing;
  });
}
// Bytes of a copy have come.
inline void complete(ArrivalBarrier* barrier, uint32_t bytes) {
  barrier->change(
      [&](ArrivalBarrier::Counts& counts) { counts.bytes -= static_cast<int32_t>(bytes); });
}
inline bool phase_is_over(ArrivalBarrier* barrier, uint32_t parity) {
  emulation::yield();
  return (barrier->look().phase & 1u) != parity;
}

inline bool phase_is_over_now(ArrivalBarrier* barrier, uint32_t parity) {
  return phase_is_over(barrier, parity);
}
template <class Deadline>
bool await_phase(ArrivalBarrier* barrier, uint32_t parity, Deadline&& deadline) {
  while (!phase_is_over(barrier, parity))
    if (deadline.expired()) return false;
  return true;
}

inline void check_bulk(const void* a, const void* b, uint32_t bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | bytes;
  if (bits % 16 != 0) std::abort();
}
inline void bulk_load(void* shared, const void* global, uint32_t bytes, ArrivalBarrier* barrier) {
  check_bulk(shared, global, bytes);
  std::memcpy(shared, global, bytes);
  complete(barrier, bytes);
}
inline void copy_word_async(void* shared, const void* global) { std::memcpy(shared, global, 4); }
inline void arrive_when_copied(ArrivalBarrier* barrier) { arrive(barrier); }

inline void bulk_store(void* global, const void* shared, uint32_t bytes) {
  check_bulk(global, shared, bytes);
  emulation::store_late(global, shared, bytes);
}
inline void bulk_commit() { emulation::commit_stores(); }
template <int Youngest>
void bulk_await_read() {
  emulation::yield();
  emulation::await_read(Youngest);
}
template <int Youngest>
void bulk_await_written() {
  emulation::yield();
  emulation::await_written(Youngest);
}

}  // namespace fanfold
