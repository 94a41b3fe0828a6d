// CTAs of a cluster, which run at the same time and read each other's shared memory. Compute
// capability 9.0 and later.
#pragma once

#include "device/memory.cuh"
#include "layout/types.h"

namespace fanfold {

// All threads of the cluster have come here, and see what the others have written to shared memory.
// A CTA whose memory others read must not end before a barrier behind that.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release;\n\t"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// This CTA's place in its cluster.
__device__ __forceinline__ uint32_t cta_of_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Arrives at the mbarrier that stands where the word `own` is in CTA `cta` of the cluster. It
// orders nothing: for a thread that has read shared memory, not for one that has written it (a
// release for the cluster is a fence of the whole GPU).
__device__ __forceinline__ void arrive_relaxed_at_cta(const void* own, uint32_t cta) {
  asm volatile(
      "{\n .reg .b32 there;\n"
      " mapa.shared::cluster.u32 there, %0, %1;\n"
      " mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(
          shared_address(own)),
      "r"(cta)
      : "memory");
}

// What stands in CTA `cta` of the cluster where `own` is in this one.
__device__ __forceinline__ uint32_t load_of_cta(const uint32_t* own, int cta) {
  uint32_t address, v;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(cta));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

// Stores `word` where `own` is in CTA `cta` of the cluster. It orders nothing.
__device__ __forceinline__ void exchange_relaxed_at_cta(uint64_t* own, int cta, uint64_t word) {
  asm volatile(
      "{\n .reg .b32 there;\n .reg .b64 before;\n"
      " mapa.shared::cluster.u32 there, %0, %1;\n"
      " atom.relaxed.cluster.shared::cluster.exch.b64 before, [there], %2;\n}" ::"r"(
          shared_address(own)),
      "r"(cta), "l"(word)
      : "memory");
}

// What stands in this CTA's shared memory, where another of the cluster may store. For few threads:
// those of a warp come one after another.
__device__ __forceinline__ uint64_t fetch_relaxed_cluster(uint64_t* own) {
  uint64_t word;
  asm volatile("atom.relaxed.cluster.shared::cta.or.b64 %0, [%1], 0;"
               : "=l"(word)
               : "r"(shared_address(own))
               : "memory");
  return word;
}

}  // namespace fanfold
