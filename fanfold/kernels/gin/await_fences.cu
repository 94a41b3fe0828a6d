#include "gin/between_calls.cuh"

namespace fanfold::gin {

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
      if (gin_take(hosts, source, came, next)) continue;
      if (deadline.expired(source)) break;
    }
  }
}

}  // namespace fanfold::gin
