// Bounded waits: every host loop that waits for another thread or process is in this module.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "layout/control.h"

namespace fanfold {

struct WaitPolicy {
  std::chrono::nanoseconds timeout;
  std::chrono::nanoseconds spin;  // before the first yield; zero if ranks outnumber cores
  // The longest sleep: long enough to cost nothing, short enough to notice Ctrl-C and a dead peer
  // soon.
  std::chrono::nanoseconds idle = std::chrono::milliseconds(50);
};

// The waiting thread calls the check after every `WaitPolicy::idle` of a long wait. The check ends
// the wait by throwing, for example after Ctrl-C. The bindings set it once, so that the core does
// not depend on Python.
using InterruptCheck = void (*)();
void set_interrupt_check(InterruptCheck check);

enum class WaitResult { kReady, kTimedOut, kPeerGone, kDeadlocked };

// Rings `bell`, and wakes its owner if the owner sleeps.
void ring(Doorbell& bell);

// For a thread that polls: pauses briefly. If many polls in a row (`empty_polls`) have found
// nothing, yields the core.
void pause_or_yield(int64_t empty_polls);

// Sleeps until `bell` is rung, at most for `at_most`. Does not sleep if `ready()` returns true: a
// ring after that call ends the sleep.
void sleep_until_rung(Doorbell& bell, const std::function<bool()>& ready,
                      std::chrono::nanoseconds at_most);

// Polls `ready()` until it returns true, at most for `policy.timeout`, and returns whether it did.
// For a condition that nobody rings a bell for: spins, then yields, then sleeps between polls, each
// time twice as long as before, up to `policy.idle`.
bool poll_until(const std::function<bool()>& ready, const WaitPolicy& policy);

// For the body of a loop that polls: lets the other thread of this core run, and leaves the polled
// cache line to its writer for a moment.
void pause_briefly();

class Waiter {
 public:
  // `bell` is the doorbell of this rank.
  Waiter(Doorbell& bell, WaitPolicy policy) : bell_(bell), policy_(policy) {}

  // Spins, then yields, then sleeps until `ready()` returns true, at most for `policy.timeout`.
  // Time in which the whole process was suspended counts only up to a second.
  //
  // If `peer_gone()` returns true and `ready()` still returns false, the wait ends early as
  // kPeerGone; a long wait calls `peer_gone()` every `policy.idle`. If `deadlocked()` is given and
  // returns true before a sleep, the wait ends as kDeadlocked.
  WaitResult until(const std::function<bool()>& ready, const std::function<bool()>& peer_gone,
                   const std::function<bool()>& deadlocked = nullptr) const;

  const WaitPolicy& policy() const { return policy_; }

 private:
  Doorbell& bell_;
  WaitPolicy policy_;
};

}  // namespace fanfold
