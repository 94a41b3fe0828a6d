// What kernels of all modes share in memory: words that say which call a rank is in, what it has
// received, and what a kernel has found wrong.
#pragma once

#include "layout/reports.h"
#include "layout/types.h"

namespace fanfold {

// ---- ranks --------------------------------------------------------------------------------------

// Of so many ranks a kernel keeps a set in one word, and their addresses in its arguments.
inline constexpr int32_t kFewRanks = 32;
inline constexpr int32_t kMostRanks = 1024;  // the lanes of a warp hold a word of a set each

// Every rank's symmetric memory.
struct PeerTable {
  unsigned char* few[kFewRanks];
  unsigned char* const* all;  // [ranks], in device memory; null where ranks are few
};

// ---- calls --------------------------------------------------------------------------------------

enum class CallKind : int32_t { kDispatch = 0, kCombine = 1 };
enum Phases : uint32_t { kSend = 1, kReceive = 2, kWhole = 3 };

// A call's number, its epoch, says which half of the memory the call uses and marks the words that
// the call writes. The first is not 0, which fresh memory holds.
inline constexpr uint32_t kFirstEpoch = 2;

// A CTA's own count of the calls it has taken part in, so that no CTA waits for another.
struct CtaEpochs {
  uint32_t send;
  uint32_t receive;
};

// Tells a call from those near it; never 0.
FANFOLD_HD constexpr uint32_t call_id(CallKind kind, uint32_t epoch) {
  return (epoch << 2) | (static_cast<uint32_t>(kind) << 1) | 1u;
}

// How many rows a source has for an expert or a rank, in this call.
struct CountedWord {
  uint32_t epoch;
  uint32_t count;

  FANFOLD_HD constexpr uint64_t encode() const { return (uint64_t{epoch} << 32) | count; }
  FANFOLD_HD static constexpr CountedWord decode(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word)};
  }
};

// ---- acknowledgements ---------------------------------------------------------------------------

// Calls of each kind that a rank has received whole, as it reports them to its peers.
struct Acknowledgement {
  uint32_t dispatches;
  uint32_t combines;

  FANFOLD_HD constexpr uint64_t encode() const { return (uint64_t{combines} << 32) | dispatches; }
  FANFOLD_HD static constexpr Acknowledgement decode(uint64_t word) {
    return {static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32)};
  }
  FANFOLD_HD constexpr uint32_t of(CallKind kind) const {
    return kind == CallKind::kDispatch ? dispatches : combines;
  }
};

// ---- which kernel a rank is in ------------------------------------------------------------------

// Which kernel a rank is in: written by each at its start in the rank's own memory, read by peers
// that have waited long. Kernels of a rank run one after another, so what the word counts has begun
// and nothing else has.
//
//   bits 0-1   the kernel's phases; 0: no kernel has run yet
//   bit 2      its kind of call
//   bit 3      whether its send half waits for headers of all peers
//   bits 4-33  of each kind 15 bits of the calls whose send half has begun, this one's included
//   bits 34-63 of each kind 15 bits of the calls received whole before this kernel
struct Progress {
  uint64_t word;

  static constexpr uint32_t kCountMask = 0x7fff;

  FANFOLD_HD static constexpr Progress of(CallKind kind, uint32_t phases, bool needs_headers) {
    return {(phases & 3u) | static_cast<uint64_t>(kind) << 2 |
            static_cast<uint64_t>(needs_headers) << 3};
  }
  FANFOLD_HD constexpr Progress with_counts(int kind, uint32_t sends, uint32_t received) const {
    return {word | static_cast<uint64_t>(sends & kCountMask) << (4 + 15 * kind) |
            static_cast<uint64_t>(received & kCountMask) << (34 + 15 * kind)};
  }

  FANFOLD_HD constexpr bool does(Phases phase) const { return (word & phase) != 0; }
  FANFOLD_HD constexpr int kind() const { return static_cast<int>(word >> 2 & 1u); }
  FANFOLD_HD constexpr bool needs_headers() const { return (word >> 3 & 1u) != 0; }
  FANFOLD_HD constexpr uint32_t sends(int kind) const {
    return static_cast<uint32_t>(word >> (4 + 15 * kind)) & kCountMask;
  }
  FANFOLD_HD constexpr uint32_t received(int kind) const {
    return static_cast<uint32_t>(word >> (34 + 15 * kind)) & kCountMask;
  }
  // The number of the kernel's call of its kind, counted from 1.
  FANFOLD_HD constexpr uint32_t call() const {
    return does(kReceive) ? (received(kind()) + 1) & kCountMask : sends(kind());
  }

  // By how many calls `count` is short of `wanted`; not positive if it is not.
  FANFOLD_HD static constexpr int32_t shortfall(uint32_t count, uint32_t wanted) {
    return static_cast<int32_t>((wanted - count) << 17) >> 17;
  }
  // Whether this kernel cannot end before `peer`, live, begins a kernel behind its own: one that
  // sends what this one receives, or that acknowledges what the peer's own has received. If two
  // kernels need each other so, neither ever ends. A kernel that has ended needs nothing of
  // anybody.
  FANFOLD_HD constexpr bool needs(Progress peer) const {
    const int k = kind();
    if (does(kReceive) && shortfall(peer.sends(k), received(k) + 1) > 0) return true;
    if (!does(kSend)) return false;
    if (needs_headers() && shortfall(peer.sends(k), sends(k)) > 0) return true;
    return shortfall(peer.received(k), sends(k) - 2) > 0;
  }
};

}  // namespace fanfold
