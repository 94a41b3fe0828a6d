// Warps, shared memory, launches that overlap, clocks.
#pragma once

#include "layout/types.h"

namespace fanfold {

inline constexpr uint32_t kFullWarp = 0xffffffffu;
inline constexpr int kWarpLanes = 32;

__device__ __forceinline__ uint32_t lanes_below() {
  uint32_t mask;
  asm("mov.u32 %0, %lanemask_lt;" : "=r"(mask));
  return mask;
}

// The dynamic shared memory of a CTA.
template <class T>
__device__ __forceinline__ T& dynamic_shared() {
  extern __shared__ __align__(128) unsigned char memory[];
  return *reinterpret_cast<T*>(memory);
}

// Without these a kernel begins when the one before in its stream has ended. A kernel that allows
// it early lets the next begin its launch; that one waits until this one's writes are there.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Leaves the SM to other warps between two looks at what is awaited.
__device__ __forceinline__ void nap() { __nanosleep(32); }

__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Of this SM's clock.
__device__ __forceinline__ uint64_t sm_cycles() {
  uint64_t t;
  asm volatile("mov.u64 %0, %clock64;" : "=l"(t));
  return t;
}

}  // namespace fanfold
