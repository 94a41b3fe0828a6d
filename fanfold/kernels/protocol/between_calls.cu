// Between calls, when no other kernel of the rank runs and all ranks do the same: nothing of earlier
// calls is under way any more when all have run both kernels.
#include "protocol/wire.cuh"

namespace fanfold {

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

// Sends a fence behind all that went to each rank on another host, and waits until it is done.
__global__ void __launch_bounds__(kThreads) fence(const GinBetweenCallsArgs args) {
  const BetweenCalls call{args};
  const GinHosts& hosts = *args.hosts->gin;
  for (int first = 0; first < kRanks; first += kWarpLanes) {
    const int rank = first + call.lane;
    const bool is_there = call.is_elsewhere(rank);
    const int peer = is_there ? rank : 0;
    push_commands(call, is_there, peer,
                  store_command(*args.hosts, peer, int64_t{GinWord::kFence}, 0));
    Deadline deadline(call);
    while (is_there && gin_puts_left(hosts, peer) != 0) {
      if (deadline.expired(peer)) break;
    }
    __syncwarp();
  }
}

// Waits for the fence of each rank on another host, and leaves the words before it out.
__global__ void __launch_bounds__(kThreads) await_fences(const GinBetweenCallsArgs args) {
  const BetweenCalls call{args};
  GinHosts& hosts = *args.hosts->gin;
  for (int source = call.lane; source < kRanks; source += kWarpLanes) {
    if (!call.is_elsewhere(source)) continue;
    GinWord next{};
    Deadline deadline(call);
    while (next.target() != GinWord::kFence) {
      const uint64_t came = gin_words_of(hosts, source);
      if (gin_take(hosts, hosts.peers[source], source, came, next)) continue;
      if (deadline.expired(source)) break;
    }
  }
}

}  // namespace fanfold
