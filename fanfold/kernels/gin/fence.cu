#include "gin/between_calls.cuh"

namespace fanfold::gin {

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

}  // namespace fanfold::gin
