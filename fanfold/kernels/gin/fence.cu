#include "gin/between_calls.cuh"

namespace fanfold::gin {

// Sends a fence behind all that went to each rank on another host, and waits until it is done.
__global__ void __launch_bounds__(kThreads) fence(const GinBetweenCallsArgs args) {
  const BetweenCalls call{args};
  const GinHosts& hosts = *args.hosts->gin;
  // Each lane for itself: a peer that is gone must not keep the fence from others.
  for (int peer = call.lane; peer < kRanks; peer += kWarpLanes) {
    if (!call.is_elsewhere(peer)) continue;
    Deadline deadline(call);
    const auto place = int64_t{GinWord::kFence};
    bool waits = gin_post(
        call, peer, store_command(*args.hosts, peer, place, args.numbers[hosts.rank]), deadline);
    while (waits && gin_puts_left(hosts, peer) != 0) waits = !deadline.expired(peer);
  }
}

}  // namespace fanfold::gin
