// The producers' side of a ring on a GPU.
#pragma once

#include "device/memory.cuh"
#include "device/warp.cuh"
#include "protocol/ring.h"

namespace fanfold {

// The accesses of protocol/ring.h by a thread of a GPU.
struct DeviceMemory {
  __device__ __forceinline__ uint64_t load_relaxed_system(const uint64_t* word) const {
    return fanfold::load_relaxed_system(word);
  }
  __device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* word) const {
    return fanfold::load_acquire_system(word);
  }
  __device__ __forceinline__ void store_release_system(uint64_t* word, uint64_t value) const {
    fanfold::store_release_system(word, value);
  }
  __device__ __forceinline__ void store_pair_release_system(uint64_t* words, uint64_t first,
                                                            uint64_t second) const {
    fanfold::store_pair_release_system(words, first, second);
  }
  __device__ __forceinline__ bool compare_exchange_relaxed_system(uint64_t* word,
                                                                  uint64_t& expected,
                                                                  uint64_t desired) const {
    return fanfold::compare_exchange_relaxed_system(word, expected, desired);
  }
  __device__ __forceinline__ uint64_t fetch_add_relaxed_system(uint64_t* word,
                                                               uint64_t value) const {
    return fanfold::fetch_add_relaxed_system(word, value);
  }
};

// The end of one thread's wait for a slot. The time counts from the first question on.
class RingDeadline {
 public:
  __device__ explicit RingDeadline(int64_t timeout_ns) : timeout_ns_(timeout_ns) {}

  __device__ bool expired() {
    const auto now = static_cast<int64_t>(global_nanoseconds());
    if (begin_ == 0) begin_ = now;
    return now - begin_ >= timeout_ns_;
  }

 private:
  int64_t timeout_ns_;
  int64_t begin_ = 0;
};

// Pushes the commands of those lanes that have one, in the order of the lanes, with one atomic add;
// by whole warps. Returns false on a lane whose command was given up, as `ring_store_or_abandon`
// does.
template <class Deadline>
__device__ __forceinline__ bool ring_push_together(const RingView& ring, bool has_command,
                                                   const Command& command, Deadline& deadline) {
  DeviceMemory memory;
  const uint32_t lanes = __ballot_sync(kFullWarp, has_command);
  if (lanes == 0) return true;
  uint64_t first = 0;
  if (threadIdx.x % kWarpLanes == 0)
    first = ring_take_tickets(ring, memory, static_cast<uint64_t>(__popc(lanes)));
  first = __shfl_sync(kFullWarp, first, 0);
  if (!has_command) return true;
  const uint64_t ticket = first + static_cast<uint64_t>(__popc(lanes & lanes_below()));
  return ring_store_or_abandon(ring, memory, ticket, command, deadline);
}

// Likewise, but takes the tickets only if there is room for all: a push that is given up leaves the
// ring as it was. Suits few producers. `deadline.expired(peer)` is asked by the first lane after
// each attempt that failed; all lanes return false if it returned true.
template <class Deadline>
__device__ __forceinline__ bool ring_try_push_together(const RingView& ring, bool has_command,
                                                       const Command& command, Deadline& deadline,
                                                       int peer) {
  DeviceMemory memory;
  const uint32_t lanes = __ballot_sync(kFullWarp, has_command);
  if (lanes == 0) return true;
  RingPush taken{RingOutcome::kFull, 0};
  if (threadIdx.x % kWarpLanes == 0) {
    const auto count = static_cast<uint64_t>(__popc(lanes));
    do {
      taken = ring_try_take_tickets(ring, memory, count);
    } while (taken.outcome != RingOutcome::kPushed && !deadline.expired(peer));
  }
  const bool pushed = taken.outcome == RingOutcome::kPushed;
  if (__shfl_sync(kFullWarp, pushed ? 1 : 0, 0) == 0) return false;
  const uint64_t first = __shfl_sync(kFullWarp, taken.ticket, 0);
  if (has_command)
    ring_store(ring, memory, first + static_cast<uint64_t>(__popc(lanes & lanes_below())), command);
  __syncwarp();  // the next push of this warp comes behind all of these
  return true;
}

}  // namespace fanfold
