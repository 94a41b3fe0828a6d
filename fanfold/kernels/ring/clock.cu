// Answers the host with this GPU's time, for `fanfold bench ring --from gpu`.
#include "constants.h"
#include "layout/ring_bench.h"
#include "protocol/ring.cuh"

namespace fanfold::ring {

__global__ void __launch_bounds__(kThreads) clock(const __grid_constant__ RingClockArgs args) {
  if (threadIdx.x != 0) return;
  for (uint64_t round = 1; round <= args.rounds; ++round) {
    RingDeadline deadline(args.timeout_ns);
    while (load_acquire_system(args.asked) != round)
      if (deadline.expired()) return;
    store_pair_release_system(args.answered, global_nanoseconds(), round);
  }
}

}  // namespace fanfold::ring
