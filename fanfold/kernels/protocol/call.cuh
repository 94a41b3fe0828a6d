// What every kernel that talks to peers is compiled for, and how it reports.
//
// Constants of all kernels: kRanks, kExperts, kTopK, kWarps, kMirror (a bench's, see `rank_at`).
#pragma once

#include "constants.h"
#include "device/memory.cuh"
#include "device/warp.cuh"
#include "layout/protocol.h"

namespace fanfold {

inline constexpr int kLocalExperts = kExperts / kRanks;
inline constexpr int kThreads = kWarps * kWarpLanes;
static_assert(kExperts % kRanks == 0 && kTopK <= kWarpLanes && kThreads <= 1024);

// Which rank this one is to `peer`: where it writes in the memory of `peer`, and whose rows the
// rows of `peer` are to be. In a bench's mirror two GPUs emulate more: each is rank 0, and what it
// sends to another rank arrives at the other GPU as from another.
template <class Args>
__device__ __forceinline__ int rank_at(const Args& args, int peer) {
  return kMirror != 0 ? (kRanks - peer) % kRanks : args.rank;
}

__device__ __forceinline__ void store_report(Report* report, const Report& what) {
  const uint4 words{what.call, what.epoch, static_cast<uint32_t>(what.first),
                    static_cast<uint32_t>(what.second)};
  store_relaxed_system(reinterpret_cast<uint4*>(report), words);
}

}  // namespace fanfold
