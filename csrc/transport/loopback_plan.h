// What the seed decides on one write of the loopback network.
#pragma once

#include <cstdint>
#include <vector>

#include "transport/loopback.h"

namespace fanfold::transport::loopback {

// Numbers that depend on a key alone (splitmix64).
class Draw {
 public:
  explicit Draw(uint64_t key) : state_(key) {}

  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    return mix(state_);
  }
  // Between `least` and `most`, both included.
  int64_t between(int64_t least, int64_t most) {
    const uint64_t count = static_cast<uint64_t>(most) - static_cast<uint64_t>(least) + 1;
    return least + static_cast<int64_t>(next() % count);
  }
  bool one_in(int32_t n) { return n > 0 && between(1, n) == 1; }
  int64_t delay(const Delay& delay) {
    const int64_t time = between(delay.least, delay.most);
    return one_in(delay.rare_one_in) ? time + delay.rare : time;
  }

  static uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
  }

 private:
  uint64_t state_;
};

// Which write it is: the `number`-th from one transport to another.
struct WriteKey {
  int32_t source_rank;
  int32_t source_thread;
  int32_t target_rank;
  int32_t target_thread;
  int64_t number;
};

struct Plan {
  int64_t delay;
  bool duplicated;
  int64_t duplicate_delay;
  bool completes_early;
  int64_t completion_delay;
  bool read_at_write;
  bool stalls;
  bool stalls_all_rails;
  int64_t stall;
  uint64_t pieces_key;  // of the times at which its pieces land
};

Plan plan_write(const Options& options, const WriteKey& key);

// Throws BadArgument.
void check_options(const Options& options);

}  // namespace fanfold::transport::loopback
