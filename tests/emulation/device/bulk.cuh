// device/bulk.cuh on a CPU. A copy is done when it is asked for.
#pragma once

#include <cstring>

#include "device/warp.cuh"
#include "layout/types.h"

namespace fanfold {

inline constexpr bool kHasBulkCopies = true;

inline void fence_shared_before_bulk() {}
inline void fence_global_and_bulk() {}
inline void fence_barrier_init() {}

// In shared memory, which one thread of the operating system has to itself; as large as on a GPU.
struct alignas(8) ArrivalBarrier {
  int32_t bytes;    // expected and not come
  int8_t arrivals;  // of a phase
  int8_t missing;   // of this one
  uint16_t phase;

  void look() {
    if (missing != 0 || bytes != 0) return;
    missing = arrivals;
    ++phase;
  }
};

static_assert(sizeof(ArrivalBarrier) == 8);

inline void init_barrier(ArrivalBarrier* barrier, uint32_t arrivals) {
  *barrier = {0, static_cast<int8_t>(arrivals), static_cast<int8_t>(arrivals), 0};
}
inline void arrive(ArrivalBarrier* barrier) {
  --barrier->missing;
  barrier->look();
}
inline void expect(ArrivalBarrier* barrier, uint32_t bytes) {
  barrier->bytes += static_cast<int32_t>(bytes);
}
inline void arrive_expecting(ArrivalBarrier* barrier, uint32_t bytes) {
  expect(barrier, bytes);
  arrive(barrier);
}
inline bool phase_is_over(ArrivalBarrier* barrier, uint32_t parity) {
  emulation::yield();
  return (barrier->phase & 1u) != parity;
}

inline bool phase_is_over_now(ArrivalBarrier* barrier, uint32_t parity) {
  return phase_is_over(barrier, parity);
}

inline void check_bulk(const void* a, const void* b, uint32_t bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | bytes;
  if (bits % 16 != 0) std::abort();
}
inline void bulk_load(void* shared, const void* global, uint32_t bytes, ArrivalBarrier* barrier) {
  check_bulk(shared, global, bytes);
  std::memcpy(shared, global, bytes);
  barrier->bytes -= static_cast<int32_t>(bytes);
  barrier->look();
}
inline void bulk_store(void* global, const void* shared, uint32_t bytes) {
  check_bulk(global, shared, bytes);
  std::memcpy(global, shared, bytes);
}
inline void copy_word_async(void* shared, const void* global) { std::memcpy(shared, global, 4); }
inline void arrive_when_copied(ArrivalBarrier* barrier) { arrive(barrier); }
inline void bulk_commit() {}
template <int Youngest>
void bulk_await_read() {}
template <int Youngest>
void bulk_await_written() {}

}  // namespace fanfold
