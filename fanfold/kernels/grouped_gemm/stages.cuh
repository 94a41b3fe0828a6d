// The ring of stages between the thread that copies operands to shared memory and the warpgroups
// that multiply them. A stage holds 128 columns of the depth: rows of a with their scales, and rows
// of b, which are columns of the result.
//
// The two CTAs of a cluster go through their rings in step: each writes to both, so a stage is free
// when the warps of both have released it.
#pragma once

#include "constants.h"
#include "device/bulk.cuh"
#include "device/cluster.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "layout/grouped_gemm.h"

namespace fanfold::grouped_gemm {

inline constexpr int kBlockDepth = 128;
inline constexpr int kTileColumns = 256;
inline constexpr int kScaleColumns = 128;  // of b, that have one scale
inline constexpr int kStages = 4;
inline constexpr int kCluster = 2;
inline constexpr int kMathWarpgroups = 2;
inline constexpr int kMathWarps = 4 * kMathWarpgroups;
inline constexpr int kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;
inline constexpr int kDepthBlocks = kDepth / kBlockDepth;
inline constexpr int kColumnBlocks = (kColumns + kTileColumns - 1) / kTileColumns;
inline constexpr int kScaleBlocks = (kColumns + kScaleColumns - 1) / kScaleColumns;

// The warpgroups share a tile's rows, or its columns where it has only one warpgroup's rows. Then a
// thread has registers for sums in two levels.
inline constexpr bool kSplitsRows = kTileRows == 2 * kWgmmaRows;
inline constexpr bool kTwoLevels = !kSplitsRows;
inline constexpr int kPartColumns = kSplitsRows ? kTileColumns : kTileColumns / 2;
inline constexpr int kSums = kPartColumns / 2;  // registers of a thread
inline constexpr int kScaleGroups = kPartColumns / kScaleColumns;

inline constexpr int kBytesA = kTileRows * kBlockDepth;
inline constexpr int kBytesB = kTileColumns * kBlockDepth;
inline constexpr int kBytesScales = kTileRows * 4;

static_assert(kTileRows == kWgmmaRows || kSplitsRows);
static_assert(kDepth % kBlockDepth == 0 && kDepthBlocks <= 2 * kWarpLanes);
static_assert(kColumns % 64 == 0);

struct Ring {
  alignas(1024) uint8_t a[kStages][kBytesA];
  alignas(1024) uint8_t b[kStages][kBytesB];
  alignas(128) float scales[kStages][kTileRows];
  ArrivalBarrier full[kStages];
  ArrivalBarrier empty[kStages];
};

// All that is waited for comes from this cluster, so no wait can last.
struct Patience {
  __device__ bool expired() { return false; }
};

// Where a role is in the ring.
struct Position {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// By one thread of the CTA; a barrier of the cluster must follow.
__device__ inline void init_ring(Ring& ring) {
  for (int i = 0; i < kStages; ++i) {
    init_barrier(&ring.full[i], 1);
    init_barrier(&ring.empty[i], kMathWarps * kCluster);
  }
  fence_barrier_init();
}

// A warp needs the stage no longer.
__device__ __forceinline__ void release_stage(Ring& ring, int stage) {
  const uint32_t lane = threadIdx.x % kWarpLanes;
  if (lane < kCluster) arrive_relaxed_at_cta(&ring.empty[stage], lane);
}

}  // namespace fanfold::grouped_gemm
