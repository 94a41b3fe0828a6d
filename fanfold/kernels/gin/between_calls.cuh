// Between calls, when no other kernel of this rank runs; others may still be in their last call.
// When all ranks have run both kernels, fence.cu and await_fences.cu, nothing of earlier calls is
// under way any more. Each rank numbers its fences: one that belongs to a change which failed is
// not taken for the next.
#pragma once

#include "protocol/wire.cuh"

namespace fanfold::gin {

// What a Deadline and the wire ask of a call.
struct BetweenCalls {
  const GinBetweenCallsArgs& args;
  const int lane = static_cast<int>(threadIdx.x);

  static constexpr uint32_t kNothingSeen = 0;

  __device__ const RemoteHosts& remote_hosts() const { return *args.hosts; }
  __device__ bool is_elsewhere(int rank) const {
    return rank < kRanks && (args.hosts->elsewhere[rank / 32] >> (rank % 32) & 1u) != 0;
  }
  __device__ static bool failed() { return false; }
  __device__ static bool is_masked(int) { return false; }
  __device__ void time_out(int peer, uint32_t) const { *args.late = peer; }
};

}  // namespace fanfold::gin
