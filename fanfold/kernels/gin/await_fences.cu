#include "gin/between_calls.cuh"

namespace fanfold::gin {

// Waits for the fence of each rank on another host, and drops the words before the fence.
__global__ void __launch_bounds__(kThreads) await_fences(const GinBetweenCallsArgs args) {
  const BetweenCalls call{args};
  for (int source = call.lane; source < kRanks; source += kWarpLanes) {
    if (!call.is_elsewhere(source)) continue;
    Deadline deadline(call);
    while (!gin_drop_to_fence(*args.hosts->gin, source, args.numbers[source])) {
      if (deadline.expired(source)) break;
    }
  }
}

}  // namespace fanfold::gin
