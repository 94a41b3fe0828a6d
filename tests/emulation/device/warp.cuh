// device/warp.cuh on a CPU. Kernels of a rank run one after the other, whole.
#pragma once

#include <time.h>

#include <cstring>

#include "layout/types.h"

namespace fanfold {

inline constexpr uint32_t kFullWarp = 0xffffffffu;
inline constexpr int kWarpLanes = 32;

inline uint32_t lanes_below() { return (1u << emulation::lane()) - 1u; }
// Of a CTA, as the kernel that ran last took it.
inline size_t emulated_shared_bytes = 0;
template <class T>
T& dynamic_shared() {
  alignas(128) static thread_local unsigned char memory[emulation::kDynamicSharedBytes];
  static_assert(sizeof(T) <= sizeof memory);
  // As a CTA finds it: of a thread that begins it is zero, of a GPU it is not.
  static thread_local const void* noise = std::memset(memory, 0xA5, sizeof memory);
  static_cast<void>(noise);
  __atomic_store_n(&emulated_shared_bytes, sizeof(T), __ATOMIC_RELAXED);
  return *reinterpret_cast<T*>(memory);
}
inline void allow_next_kernel() {}
inline void wait_for_previous_kernel() {}
inline void nap() {}
inline uint64_t global_nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}
// Of a clock of 2 GHz.
inline uint64_t sm_cycles() { return 2 * global_nanoseconds(); }

}  // namespace fanfold
