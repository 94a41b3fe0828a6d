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
    // Two stores, in this order: of one store of both words a reader may see either word first.
    store_relaxed_system(args.answered, global_nanoseconds());
    store_release_system(args.answered + 1, round);
  }
}

}  // namespace fanfold::ring
