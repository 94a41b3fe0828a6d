// device/warp.cuh on a CPU. Kernels of a rank run one after the other, whole.
#pragma once

#include <cstring>

#include "layout/types.h"

namespace fanfold {

inline constexpr uint32_t kFullWarp = 0xffffffffu;
inline constexpr int kWarpLanes = 32;

inline uint32_t lanes_below() { return (1u << emulation::Cta::own()->lane()) - 1u; }
template <class T>
T& dynamic_shared() {
  alignas(128) static thread_local unsigned char memory[emulation::kDynamicSharedBytes];
  static_assert(sizeof(T) <= sizeof memory);
  // As a CTA finds it: of a thread that begins it is zero, of a GPU it is not.
  static thread_local const void* noise = std::memset(memory, 0xA5, sizeof memory);
  static_cast<void>(noise);
  emulation::dynamic_shared_bytes() = sizeof(T);
  return *reinterpret_cast<T*>(memory);
}
inline void allow_next_kernel() {}
inline void wait_for_previous_kernel() {}
inline void nap() {}
inline uint64_t global_nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
}

}  // namespace fanfold
