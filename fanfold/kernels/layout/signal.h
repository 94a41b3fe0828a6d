// A signal: one 64-bit word that says which call it belongs to and carries one number.
//
// A rank pushes a signal into the memory of the peer that waits for it, after the data it speaks
// of, with one release store; the peer loads it with acquire. The epoch only grows, so a signal is
// never reset, and a late look at an old one cannot be mistaken for the awaited one.
#pragma once

#include "layout/types.h"

namespace fanfold {

struct Signal {
  uint32_t epoch;
  int32_t value;

  FANFOLD_HD constexpr uint64_t encode() const {
    return (static_cast<uint64_t>(epoch) << 32) | static_cast<uint32_t>(value);
  }

  FANFOLD_HD static constexpr Signal decode(uint64_t word) {
    return Signal{static_cast<uint32_t>(word >> 32),
                  static_cast<int32_t>(static_cast<uint32_t>(word))};
  }
};

// The value of a signal whose sender refused its own input: there is no data in this epoch, and
// the reason stands in the sender's control block.
inline constexpr int32_t kRefusedValue = -1;

// Whether an epoch has been reached. Epochs are compared by distance, so that they may wrap.
FANFOLD_HD constexpr bool reached(uint32_t actual, uint32_t expected) {
  return static_cast<int32_t>(actual - expected) >= 0;
}

// Two calls may be in flight, so whatever a call writes exists twice.
inline constexpr int32_t kParities = 2;

FANFOLD_HD constexpr int32_t parity_of(uint32_t epoch) {
  return static_cast<int32_t>(epoch % kParities);
}

static_assert(Signal::decode(Signal{7, kRefusedValue}.encode()).value == kRefusedValue);
static_assert(Signal::decode(Signal{0xffffffffu, 5}.encode()).epoch == 0xffffffffu);
static_assert(reached(1, 0xfffffffeu) && !reached(0xfffffffeu, 1));

}  // namespace fanfold
