// Bounded waits: the one home of every loop that waits for somebody else.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "layout/control.h"

namespace fanfold {

struct WaitPolicy {
  std::chrono::nanoseconds timeout;
  std::chrono::nanoseconds spin;  // before the first yield; zero where ranks outnumber cores
  // The longest sleep: long enough to cost nothing, short enough for Ctrl-C and a dead peer to be
  // noticed soon.
  std::chrono::nanoseconds idle = std::chrono::milliseconds(50);
};

// Called every `WaitPolicy::idle` of a long wait, from the waiting thread: lets an interrupt
// (Ctrl-C) through by throwing. Set once by the bindings; the core knows nothing of Python.
using InterruptCheck = void (*)();
void set_interrupt_check(InterruptCheck check);

enum class WaitResult { kReady, kTimedOut, kAbandoned, kDeadlocked };

// Rings `bell` and wakes its owner if it sleeps.
void ring(Doorbell& bell);

class Waiter {
 public:
  // Waits on `bell`, the doorbell of this rank.
  Waiter(Doorbell& bell, WaitPolicy policy) : bell_(bell), policy_(policy) {}

  // Spins, then yields, then sleeps until `ready()`; at most `policy.timeout`, to which a time in
  // which the whole process stood still counts for little.
  // `hopeless()` is asked now and then during a long wait; when it says yes and `ready()` still
  // does not hold, the wait ends early as kAbandoned. `deadlocked()`, if given, is asked before
  // every sleep, and ends the wait as kDeadlocked.
  WaitResult until(const std::function<bool()>& ready, const std::function<bool()>& hopeless,
                   const std::function<bool()>& deadlocked = nullptr) const;

  const WaitPolicy& policy() const { return policy_; }

 private:
  void sleep_until_rung(const std::function<bool()>& ready, std::chrono::nanoseconds at_most) const;

  Doorbell& bell_;
  WaitPolicy policy_;
};

}  // namespace fanfold
