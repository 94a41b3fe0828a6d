// How often and how long a rank has waited for its peers, by phase and peer.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "layout/control.h"

namespace fanfold {

// The peer of a wait that any one of several peers ends.
inline constexpr int32_t kAnyPeer = -1;

struct WaitCount {
  Phase phase;
  int32_t peer;
  uint64_t waits;
  uint64_t failures;  // of them: ended without what they waited for
  uint64_t nanoseconds;
};

// Any thread may count and read.
class WaitCounts {
 public:
  explicit WaitCounts(int32_t ranks);

  void add(Phase phase, int32_t peer, std::chrono::nanoseconds waited, bool failed);
  // Those of phases and peers that the rank has waited for.
  std::vector<WaitCount> all() const;

 private:
  struct Words {
    uint64_t waits = 0;
    uint64_t failures = 0;
    uint64_t nanoseconds = 0;
  };
  size_t peers_;              // and kAnyPeer before them
  std::vector<Words> words_;  // [phases][peers_]
};

// Counts a wait from its construction to its destruction.
class CountedWait {
 public:
  CountedWait(WaitCounts& counts, Phase phase, int32_t peer)
      : counts_(counts), phase_(phase), peer_(peer) {}
  ~CountedWait() { counts_.add(phase_, peer_, waited(), !ready_); }
  CountedWait(const CountedWait&) = delete;
  CountedWait& operator=(const CountedWait&) = delete;

  // The wait has not failed. Returns true.
  bool ready() { return ready_ = true; }
  std::chrono::nanoseconds waited() const { return std::chrono::steady_clock::now() - start_; }

 private:
  WaitCounts& counts_;
  Phase phase_;
  int32_t peer_;
  bool ready_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace fanfold
