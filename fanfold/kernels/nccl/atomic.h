// The part of libcu++'s <cuda/atomic> that NCCL's device headers use, for NVRTC, over the
// compiler's own atomics. Those want order and scope as literals. So all have the scope of the
// system, and an order that may be stronger than the one asked for.
#pragma once

#include "layout/types.h"

namespace cuda {

// The values of libcu++, as NCCL compares scopes by them.
enum memory_order {
  memory_order_relaxed,
  memory_order_consume,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};
enum thread_scope {
  thread_scope_system,
  thread_scope_device,
  thread_scope_block,
  thread_scope_thread = 10
};

__device__ __forceinline__ void atomic_thread_fence(memory_order order,
                                                    thread_scope scope = thread_scope_system) {
  static_cast<void>(scope);
  if (order == memory_order_relaxed) return;
  if (order == memory_order_seq_cst)
    __nv_atomic_thread_fence(__NV_ATOMIC_SEQ_CST, __NV_THREAD_SCOPE_SYSTEM);
  else
    __nv_atomic_thread_fence(__NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_SYSTEM);
}

template <class T, thread_scope Scope = thread_scope_system>
class atomic_ref {
 public:
  __device__ __forceinline__ explicit atomic_ref(T& word) : word_(&word) {}

  __device__ __forceinline__ T load(memory_order order = memory_order_seq_cst) const {
    if (order == memory_order_relaxed)
      return __nv_atomic_load_n(word_, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
    if (order == memory_order_seq_cst)
      return __nv_atomic_load_n(word_, __NV_ATOMIC_SEQ_CST, __NV_THREAD_SCOPE_SYSTEM);
    return __nv_atomic_load_n(word_, __NV_ATOMIC_ACQUIRE, __NV_THREAD_SCOPE_SYSTEM);
  }
  __device__ __forceinline__ void store(T value, memory_order order = memory_order_seq_cst) const {
    if (order == memory_order_relaxed)
      __nv_atomic_store_n(word_, value, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
    else if (order == memory_order_seq_cst)
      __nv_atomic_store_n(word_, value, __NV_ATOMIC_SEQ_CST, __NV_THREAD_SCOPE_SYSTEM);
    else
      __nv_atomic_store_n(word_, value, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_SYSTEM);
  }
  __device__ __forceinline__ T fetch_add(T value, memory_order order = memory_order_seq_cst) const {
    if (order == memory_order_relaxed)
      return __nv_atomic_fetch_add(word_, value, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
    return __nv_atomic_fetch_add(word_, value, __NV_ATOMIC_SEQ_CST, __NV_THREAD_SCOPE_SYSTEM);
  }
  __device__ __forceinline__ T fetch_max(T value, memory_order order = memory_order_seq_cst) const {
    if (order == memory_order_relaxed)
      return __nv_atomic_fetch_max(word_, value, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
    return __nv_atomic_fetch_max(word_, value, __NV_ATOMIC_SEQ_CST, __NV_THREAD_SCOPE_SYSTEM);
  }
  __device__ __forceinline__ bool compare_exchange_weak(
      T& expected, T desired, memory_order order = memory_order_seq_cst) const {
    return compare_exchange_weak(expected, desired, order, order);
  }
  __device__ __forceinline__ bool compare_exchange_weak(T& expected, T desired,
                                                        memory_order success,
                                                        memory_order failure) const {
    if (success == memory_order_relaxed && failure == memory_order_relaxed)
      return __nv_atomic_compare_exchange_n(word_, &expected, desired, true, __NV_ATOMIC_RELAXED,
                                            __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
    return __nv_atomic_compare_exchange_n(word_, &expected, desired, true, __NV_ATOMIC_SEQ_CST,
                                          __NV_ATOMIC_SEQ_CST, __NV_THREAD_SCOPE_SYSTEM);
  }

 private:
  T* word_;
};

}  // namespace cuda
