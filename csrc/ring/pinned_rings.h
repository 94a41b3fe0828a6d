// Rings that one GPU pushes into and threads of this process pop (`fanfold bench ring --from gpu`).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout/ring_bench.h"
#include "ring/measure.h"
#include "ring/ring.h"

namespace fanfold {

// The same moment on the clocks of the host and of a GPU, in nanoseconds.
struct ClockPair {
  int64_t host_ns;
  int64_t gpu_ns;
  int64_t round_trip_ns;  // the moment is uncertain by half of it on either side
};

// Asks the GPU for its time once for each of the rounds that its kernel answers, and returns what
// the fastest round has found. Throws Misuse if it does not answer.
ClockPair compare_clocks(uint64_t* asked, const uint64_t* answered, uint64_t rounds);

class PinnedRings {
 public:
  // Makes `count` rings of `slots` in `bytes` of memory at an address that is the GPU's, too,
  // aligned to 128 bytes. `heads` is the address in the GPU's memory of as many RingHead, all 0.
  // Throws BadArgument.
  PinnedRings(std::byte* memory, int64_t bytes, int64_t count, int64_t slots, RingHead* heads);
  static int64_t bytes(int64_t count, int64_t slots);

  // [count], in the memory, for the GPU.
  const RingView* views() const { return views_; }

  // Pops from ring r the NumberedCommands that `producers` producers, of which `lanes` with
  // consecutive numbers share a ring and then the next ones the next ring, push `commands` of each.
  // Ring r belongs to thread r % threads. With `timed` the numbers are times, which are kept with
  // those of arrival for `latency`. Throws Misuse if none comes for long, or if one is lost or out
  // of its producer's order.
  RingThroughput pop(int64_t producers, int64_t lanes, int64_t commands, int32_t threads,
                     bool timed);

  // Of the last timed `pop`, which lay between these two moments.
  RingLatency latency(const ClockPair& before, const ClockPair& after) const;

 private:
  struct Sample {
    int64_t pushed_ns, arrived_ns;  // each on its own clock
  };
  struct Share;  // of a thread

  void pop_share(Share& share, int64_t commands, int64_t lanes, bool timed);
  void use(Share& share, const Command& command, bool timed);

  RingView* views_;
  std::vector<Consumer> consumers_;
  std::vector<Sample> samples_;
};

}  // namespace fanfold
