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

// What the consumers of a run expect. Producers have consecutive numbers: the first `lanes` of them
// share a ring, the next ones the next ring, and so on in turn.
struct PushedCommands {
  int64_t producers;
  int64_t lanes;
  int64_t each;  // commands of a producer
  bool timed;    // their numbers are times on the GPU's clock; else they count from 0
};

// Asks the GPU for its time once for each of the rounds that its kernel answers, and returns what
// the fastest round has found. Throws Misuse if it does not answer.
ClockPair compare_clocks(uint64_t* asked, const uint64_t* answered, uint64_t rounds);

class PinnedRings {
 public:
  // Makes `count` rings of `slots` in `bytes` of memory at an address that is the GPU's, too,
  // aligned to 128 bytes. `heads` is the address in the GPU's memory of as many RingHead, all 0.
  // Throws BadArgument, as `bytes` does.
  PinnedRings(std::byte* memory, int64_t bytes, int64_t count, int64_t slots, RingHead* heads);
  ~PinnedRings();
  PinnedRings(const PinnedRings&) = delete;
  PinnedRings& operator=(const PinnedRings&) = delete;
  static int64_t bytes(int64_t count, int64_t slots);

  // [count], in the memory, for the GPU.
  const RingView* views() const { return views_; }

  // Before the kernel is launched: makes room for what `pop` will note. Ring r belongs to thread
  // r % threads. Throws BadArgument.
  void prepare(const PushedCommands& commands, int32_t threads);
  // Pops the NumberedCommands that were prepared for; one call at a time. Throws Misuse if none
  // comes for 10 s, or if one is lost or out of its producer's order: counted numbers follow each
  // other, times do not fall.
  RingThroughput pop();

  // Of the last timed `pop`, which lay between these two moments. Throws Misuse if there was none,
  // or if the moments are not in order.
  RingLatency latency(const ClockPair& before, const ClockPair& after) const;

 private:
  struct Sample {
    int64_t pushed_ns, arrived_ns;  // each on its own clock
  };
  struct PopThread;
  // Threads that pop neighbouring rings do not share a cache line.
  struct alignas(kAreaAlignment) RingConsumer {
    Consumer consumer;
  };

  void pop_rings(PopThread& thread);
  void use(PopThread& thread, const Command& command) const;

  RingView* views_;
  std::vector<RingConsumer> consumers_;
  PushedCommands expected_{};
  std::vector<PopThread> threads_;
  std::vector<Sample> samples_;
};

}  // namespace fanfold
