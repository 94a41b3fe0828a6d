// Detects ranks that deadlock because they are in different calls. Each rank of a host publishes a
// wait that has lasted, and its peers read it.
//
// A rank that waits is in one call and pushes no signal until its wait ends. So if rank 0 waits for
// a signal of rank 1, rank 1 waits for a signal of rank 0 (or more ranks wait in a cycle), and no
// rank has pushed these signals, then no rank ever will: the ranks are in different calls. A rank
// that is only late does not wait, so it is in no cycle.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "layout/control.h"
#include "layout/signal.h"

namespace fanfold {

// A signal that a rank waits for.
struct AwaitedSignal {
  int32_t peer;  // the rank that pushes the signal
  Phase phase;
  uint32_t call;        // the number of the call that waits
  uint32_t epoch;       // the epoch that the signal must reach
  int64_t offset;       // in the modes' part of the waiting rank's region
  int64_t alternative;  // offset of another signal that also ends the wait, or `offset` again
  bool exact = false;   // whether a later epoch than `epoch` does not end the wait
  // PeerTimeout appends this text to the name of the phase.
  const char* detail = "";
};

// The owner of `pending` publishes the signal that it waits for, or the end of its wait.
void publish(PendingWait& pending, const AwaitedSignal& awaited);
void withdraw(PendingWait& pending);

// The wait of one rank, as its peers read it.
struct BlockedRank {
  int32_t rank;
  Phase phase;
  uint32_t call;
};

// Access to the published waits and to the signals of all ranks.
struct PendingView {
  int32_t ranks;
  std::function<const PendingWait&(int32_t rank)> pending;
  std::function<Signal(int32_t rank, int64_t offset)> signal;  // in the rank's own memory
};

// Returns the chain of ranks that wait for each other, beginning with `rank`, if the wait of `rank`
// can never end. Returns an empty chain otherwise. `rank` must have published its wait.
std::vector<BlockedRank> find_deadlock(const PendingView& view, int32_t rank);

}  // namespace fanfold
