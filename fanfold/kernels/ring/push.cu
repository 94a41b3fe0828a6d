// Pushes commands into rings for `fanfold bench ring --from gpu`.
#include "constants.h"
#include "layout/ring_bench.h"
#include "protocol/ring.cuh"

namespace fanfold::ring {

// When a producer pushes: at once, or in even steps that begin at another time in each CTA, once
// the threads that pop run.
class Pace {
 public:
  __device__ explicit Pace(int64_t interval_ns)
      : interval_ns_(interval_ns), due_(static_cast<int64_t>(global_nanoseconds()) + kLeadNs +
                                        interval_ns * blockIdx.x / gridDim.x) {}

  // The number of the command `i`, once it is due.
  __device__ uint64_t await(int64_t i) {
    if (interval_ns_ == 0) return static_cast<uint64_t>(i);
    auto now = static_cast<int64_t>(global_nanoseconds());
    while (now < due_) now = static_cast<int64_t>(global_nanoseconds());
    due_ += interval_ns_;
    return static_cast<uint64_t>(now);
  }

 private:
  static constexpr int64_t kLeadNs = 1'000'000;

  int64_t interval_ns_;
  int64_t due_;
};

__global__ void __launch_bounds__(kThreads) push(const __grid_constant__ RingPushArgs args) {
  const int lane = static_cast<int>(threadIdx.x);
  const bool pushes = lane < args.lanes;
  const RingView ring = args.rings[blockIdx.x % args.ring_count];
  const auto producer = static_cast<uint64_t>(blockIdx.x) * args.lanes + lane;
  Pace pace(args.interval_ns);
  for (int64_t i = 0; i < args.commands; ++i) {
    const uint64_t number = __shfl_sync(kFullWarp, pace.await(i), 0);
    RingDeadline deadline(args.timeout_ns);
    const Command command = NumberedCommand{producer, number}.command();
    const bool done = ring_push_together(ring, pushes, command, deadline);
    if (__any_sync(kFullWarp, !done)) return;  // the ring has counted what was abandoned
  }
}

}  // namespace fanfold::ring
