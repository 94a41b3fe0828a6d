// The ring of stages between the thread that copies operands to shared memory and the warpgroups
// that multiply them. A stage holds 128 columns of the depth: rows of a with their scales, and rows
// of b, which are columns of the result.
//
// The two CTAs of a cluster go through their rings in step: each writes to both, so a stage is free
// when the warps of both have released it.
//
// Constant: kTileRows, 128, or 64 where groups have few rows.
#pragma once

#include "constants.h"
#include "device/bulk.cuh"
#include "device/cluster.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"

namespace fanfold::gemm {

inline constexpr int kBlockDepth = 128;
inline constexpr int kTileColumns = 256;
inline constexpr int kScaleColumns = 128;  // of b, that have one scale
inline constexpr int kStages = 4;
inline constexpr int kCluster = 2;
inline constexpr int kMathWarpgroups = 2;
inline constexpr int kMathWarps = 4 * kMathWarpgroups;
inline constexpr int kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;

// The warpgroups share a tile's rows, or its columns where it has only one warpgroup's rows.
inline constexpr bool kSplitsRows = kTileRows == 2 * kWgmmaRows;
inline constexpr int kPartColumns = kSplitsRows ? kTileColumns : kTileColumns / 2;
inline constexpr int kSums = kPartColumns / 2;  // registers of a thread
inline constexpr int kScaleGroups = kPartColumns / kScaleColumns;

inline constexpr int kBytesA = kTileRows * kBlockDepth;
inline constexpr int kBytesB = kTileColumns * kBlockDepth;
inline constexpr int kBytesScales = kTileRows * 4;
static_assert(kBytesA % 1024 == 0 && kBytesB % 1024 == 0 && kBytesScales % 128 == 0);

static_assert(kTileRows == kWgmmaRows || kSplitsRows);

// It begins on 1024 bytes, which it does not ask for: its size would be a multiple of them too.
struct Ring {
  uint8_t a[kStages][kBytesA];
  uint8_t b[kStages][kBytesB];
  float scales[kStages][kTileRows];
  ArrivalBarrier full[kStages];
  ArrivalBarrier empty[kStages];
};

// How roles wait whose stages are filled from this cluster alone, so that no wait can last.
struct EndlessWaits {
  struct Patience {
    __device__ bool expired() const { return false; }
  };
  __device__ __forceinline__ void operator()(ArrivalBarrier* barrier, uint32_t parity) const {
    await_phase(barrier, parity, Patience{});
  }
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

// By one thread of the CTA; a barrier of the cluster must follow. `loaders`: threads that fill each
// stage.
__device__ inline void init_ring(Ring& ring, int loaders) {
  for (int i = 0; i < kStages; ++i) {
    init_barrier(&ring.full[i], loaders);
    init_barrier(&ring.empty[i], kMathWarps * kCluster);
  }
  fence_barrier_init();
}

// Two boxes of half a block each: both by this CTA, or one by each CTA of the cluster for both.
template <int kHalfRows>
__device__ __forceinline__ void load_block(uint8_t* shared, const TensorMap* map, Box at,
                                           ArrivalBarrier* full, bool for_both) {
  constexpr int kHalfBytes = kHalfRows * kBlockDepth;
  if (for_both) {
    const auto half = static_cast<int>(cta_of_cluster());
    load_box_multicast(shared + half * kHalfBytes, map, {at.x, at.y + half * kHalfRows, at.z}, full,
                       0b11);
  } else {
    load_box(shared, map, at, full);
    load_box(shared + kHalfBytes, map, {at.x, at.y + kHalfRows, at.z}, full);
  }
}

// This thread's number, from which the compiler computes no addresses ahead of a tile: there are no
// registers for them.
__device__ __forceinline__ int settled_thread() {
  uint32_t thread = threadIdx.x;
  register_settle(thread);
  return static_cast<int>(thread);
}

// A warp needs the stage no longer.
__device__ __forceinline__ void release_stage(Ring& ring, int stage) {
  const uint32_t lane = threadIdx.x % kWarpLanes;
  if (lane < kCluster) arrive_relaxed_at_cta(&ring.empty[stage], lane);
}

// A warpgroup's way through the ring. `Waits` waits for a phase of a barrier.
template <class Waits>
class Stages {
 public:
  __device__ Stages(Ring& ring, const Waits& waits) : ring_(ring), waits_(waits) {}

  __device__ Ring& ring() const { return ring_; }
  __device__ int stage() const { return at_.stage; }
  __device__ void advance() { at_.advance(); }
  __device__ void release(int stage) const { release_stage(ring_, stage); }

  // Mostly there is nothing to wait for, and then the loop of the wait is not entered.
  __device__ void await() const {
    ArrivalBarrier* full = &ring_.full[at_.stage];
    if (!phase_is_over(full, at_.parity)) waits_(full, at_.parity);
  }

  // Blocks of the depth of which this warpgroup computes nothing.
  __device__ void skip(int depth_blocks) {
    for (int k = 0; k < depth_blocks; ++k, at_.advance()) {
      await();
      __syncwarp();  // else a lane that looks late could miss the phase
      release(at_.stage);
    }
  }

 private:
  Ring& ring_;
  const Waits waits_;
  Position at_;
};

}  // namespace fanfold::gemm
