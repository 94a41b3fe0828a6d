#include "gin/between_calls.cuh"

namespace fanfold::gin {

// Waits for the fence of each rank on another host, and leaves the words before it out. It may have
// come while the last call of this rank still ran.
__global__ void __launch_bounds__(kThreads) await_fences(const GinBetweenCallsArgs args) {
  const BetweenCalls call{args};
  GinHosts& hosts = *args.hosts->gin;
  for (int source = call.lane; source < kRanks; source += kWarpLanes) {
    if (!call.is_elsewhere(source)) continue;
    GinPeer& from = hosts.peers[source];
    Deadline deadline(call);
    while (from.fences < args.number) {
      GinWord next{};
      if (gin_take(hosts, source, gin_words_of(hosts, source), next)) {
        if (next.target() == GinWord::kFence) from.fences = next.word;
      } else if (deadline.expired(source)) {
        break;
      }
    }
  }
}

}  // namespace fanfold::gin
