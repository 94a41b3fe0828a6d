// Measures rings between threads of this process (`fanfold bench ring`).
#pragma once

#include <cstdint>
#include <vector>

namespace fanfold {

struct RingThroughput {
  int64_t commands;  // that the consumer has popped, each checked to be its producer's next one
  double seconds;    // from the consumer's first attempt to its last command
};

// Pushes `commands` from `producers` threads as fast as they can; this thread is the consumer. It
// polls, and rests for 200 ns each time it has popped all there is. No thread sleeps while commands
// come, so each needs a core of its own. Throws BadArgument, and
// RingFull if threads get no time to run for seconds.
RingThroughput measure_ring_throughput(int64_t slots, int32_t producers, int64_t commands);

struct RingLatency {
  int64_t commands;
  double rate;  // commands per second that the producer has reached
  // Between threads what one look at the clock takes, of which each latency contains one. From a
  // GPU by how much its clock may be off on either side.
  double clock_ns;
  double average_ns;
  int64_t p50_ns;
  int64_t p99_ns;
  int64_t most_ns;
};

// Of one latency or more, which it sorts; leaves the rate and the clock 0.
RingLatency summarize_latencies(std::vector<int64_t>& latencies);

// Measures how long commands take one way. One thread pushes `commands` at `rate` per second, each
// with the time before the push in it; this thread pops and subtracts that time from its own, on
// the same monotonic clock. Nothing is a half of a round trip. Throws as `measure_ring_throughput`
// does.
RingLatency measure_ring_latency(int64_t slots, double rate, int64_t commands);

}  // namespace fanfold
