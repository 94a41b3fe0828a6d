// The control block at the start of every rank's symmetric memory.
#pragma once

#include "layout/types.h"

namespace fanfold {

// What a rank sleeps on. Whoever pushes something that the owner may wait for increments `rings`
// and, if `sleepers` is not zero, wakes the owner. The two words are the only ones in the system
// that several ranks write.
struct alignas(kAreaAlignment) Doorbell {
  uint32_t rings;
  uint32_t sleepers;
};

// The phases a call can wait in. Both parities of each have a place for a refusal's reason.
enum class Phase : int32_t {
  kBarrier,
  kLowLatencyDispatch,
  kLowLatencyCombine,
  kHighThroughputCounts,
  kHighThroughputDispatch,
  kHighThroughputCombine,
  kCount,
};

inline constexpr int64_t kReasonBytes = 256;

// What a rank waits for, published once the wait has lasted, for peers that wait, too. Only the
// owner writes it. `sequence` is even while the rank waits for nobody, and changes with every wait.
struct alignas(kAreaAlignment) PendingWait {
  uint64_t sequence;
  int64_t offsets[2];  // of the awaited signal among the modes' part; either of two will do
  uint32_t epoch;      // that it must reach
  uint32_t call;       // the number of the call that waits
  int32_t phase;       // its Phase
  int32_t peer;        // who pushes the signal
};

struct alignas(kAreaAlignment) ControlBlock {
  uint64_t magic;
  Doorbell doorbell;
  PendingWait pending;
  // Written by the owner before it pushes a refused signal, read by its peers after they see it.
  char reasons[static_cast<int32_t>(Phase::kCount)][2][kReasonBytes];
};

inline constexpr uint64_t kControlMagic = 0x30646c6f666e6166ull;  // "fanfold0", little endian

// Control block, then one barrier signal for each rank, then what the modes place. A rank cannot
// read the control block of a peer on another host, so there each rank has a copy of every peer's
// reasons between the two.
struct ControlLayout {
  int32_t ranks;
  bool across_hosts = false;

  static constexpr int64_t kReasonsBytes = sizeof(ControlBlock::reasons);

  FANFOLD_HD constexpr int64_t barrier_offset() const {
    return align_up(static_cast<int64_t>(sizeof(ControlBlock)), kAreaAlignment);
  }
  FANFOLD_HD constexpr int64_t reasons_offset(int32_t peer) const {
    return barrier_offset() + align_up(int64_t{8} * ranks, kAreaAlignment) + peer * kReasonsBytes;
  }
  FANFOLD_HD constexpr int64_t bytes() const { return reasons_offset(across_hosts ? ranks : 0); }
};

static_assert(ControlLayout::kReasonsBytes % kAreaAlignment == 0);

}  // namespace fanfold
