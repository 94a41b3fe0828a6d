// device/cluster.cuh on a CPU.
#pragma once

#include <cstdlib>

#include "device/bulk.cuh"
#include "device/memory.cuh"
#include "layout/types.h"

namespace fanfold {

// CTAs are threads, whose own variables lie at the same distances from each other: so from this one
// to a place in shared memory it is as far in every CTA.
inline thread_local unsigned char emulated_anchor;

inline void cluster_barrier() {
  __syncthreads();
  if (threadIdx.x == 0) emulation::meet_cluster(&emulated_anchor);
  __syncthreads();
}

inline uint32_t cta_of_cluster() { return emulation::cta_of_cluster(); }

// Where `own` is in another CTA of the cluster, which has not ended.
template <class T>
T* emulated_place(const T* own, unsigned cta) {
  unsigned char* anchor = emulation::anchor_of(cta);
  if (anchor == nullptr) std::abort();
  const auto distance = reinterpret_cast<const unsigned char*>(own) - &emulated_anchor;
  return reinterpret_cast<T*>(anchor + distance);
}

// Noise where the other CTA has ended, which it may have done long ago.
inline uint32_t load_of_cta(const uint32_t* own, int cta) {
  if (blockIdx.x == 0) emulation::nap();
  if (emulation::anchor_of(static_cast<unsigned>(cta)) == nullptr) return 0xA5A5A5A5u;
  return *emulated_place(own, static_cast<unsigned>(cta));
}

inline void arrive_relaxed_at_cta(const void* own, uint32_t cta) {
  const auto* barrier = static_cast<const ArrivalBarrier*>(own);
  arrive(emulated_place(barrier, cta));
}

inline void exchange_relaxed_at_cta(uint64_t* own, int cta, uint64_t word) {
  emulated_store(emulated_place(own, static_cast<unsigned>(cta)), word);
}
inline uint64_t fetch_relaxed_cluster(uint64_t* own) { return emulated_load(own); }

}  // namespace fanfold
