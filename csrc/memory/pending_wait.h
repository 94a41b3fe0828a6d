// Waits that have lasted, as the ranks of a host show them to each other, and the deadlock that
// ranks in different calls make of them.
//
// A rank that waits is in one call and pushes nothing until its wait ends. So if rank 0 waits for a
// signal of rank 1, rank 1 for one of rank 0 (or over more ranks in a circle), and none of these
// signals has been pushed, none ever will be: the ranks are in different calls. A rank that is only
// late waits for nobody, and no circle goes through it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "layout/control.h"
#include "layout/signal.h"

namespace fanfold {

// A signal that a rank waits for.
struct Awaited {
  int32_t peer;  // pushes it
  Phase phase;
  uint32_t call;       // the number of the call that waits
  uint32_t epoch;      // that the signal must reach
  int64_t offset;      // in the modes' part of the waiting rank's region
  int64_t other;       // of a signal that does as well; `offset` again if there is none
  bool exact = false;  // whether a later epoch does not do
  // What of the call is waited for, for PeerTimeout; empty: all that the call brings.
  const char* what = "";
};

// Stores what the owner of `place` waits for, or that its wait is over.
void publish(PendingWait& place, const Awaited& awaited);
void withdraw(PendingWait& place);

// One rank's wait as its peers read it.
struct Blocked {
  int32_t rank;
  Phase phase;
  uint32_t call;
};

// What a rank can read of all ranks.
struct PendingView {
  int32_t ranks;
  std::function<const PendingWait&(int32_t rank)> pending;
  std::function<Signal(int32_t rank, int64_t offset)> signal;  // in the rank's own memory
};

// If `rank`, which has published its wait, can never go on: the ranks that wait for each other,
// from `rank` on. Else empty.
std::vector<Blocked> find_deadlock(const PendingView& view, int32_t rank);

}  // namespace fanfold
