// What `fanfold bench ring` pushes, and the arguments of its kernels.
#pragma once

#include "layout/ring.h"

namespace fanfold {

// A command with a producer and a number instead of fields; no proxy sees it.
struct NumberedCommand {
  uint64_t producer;  // of 60 bits
  uint64_t number;    // of 63 bits

  FANFOLD_HD constexpr Command command() const { return {{producer << 4, number << 1}}; }
  FANFOLD_HD static constexpr NumberedCommand of(const Command& command) {
    return {command.words[0] >> 4, command.words[1] >> 1};
  }
};

// A CTA is one warp, of which so many lanes are producers. They push into ring CTA % rings.
struct RingPushArgs {
  const RingView* rings;  // whose heads are in this GPU's memory
  int64_t commands;       // of each producer
  // Between pushes of a producer, whose commands then have the time of the push for a number; 0: as
  // fast as it can, numbered from 0.
  int64_t interval_ns;
  int64_t timeout_ns;
  int32_t ring_count;
  int32_t lanes;  // that push at the same time, 1 to 32
};

// A round ends when the host reads its number in the second of two words; the first has the time of
// this GPU then.
struct RingClockArgs {
  const uint64_t* asked;  // the number of the round that the host has begun, from 1
  uint64_t* answered;     // [2]
  uint64_t rounds;
  int64_t timeout_ns;
};

}  // namespace fanfold
