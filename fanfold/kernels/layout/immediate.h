// The 32-bit immediate that travels with every write between proxies.
//
//   bits 0-1         kind
//   the next bits    source rank: as many bits as the number of ranks needs
//   data             counter (4), sequence (8), parts (all bits that are left)
//   signal           counter (4), sequence (8), amount (all bits that are left)
//   acknowledgement  messages accepted in order, modulo 2^acknowledgement_bits()
//   store            as a signal of counter 0 and amount 1
//
// A receiver gets immediates from the network, so it uses only what `decode` has checked.
#pragma once

#include "layout/types.h"

namespace fanfold {

inline constexpr int32_t kMostProxyRanks = 4096;
// Counters that each rank keeps for each source. The last one counts barriers; the others belong to
// the commands of producers.
inline constexpr int32_t kCounters = 16;
inline constexpr int32_t kBarrierCounter = kCounters - 1;
inline constexpr int32_t kSequenceBits = 8;
// Half of the sequence numbers: then the distance of two numbers tells an old message, which has
// arrived again, from a new one.
inline constexpr int32_t kMostInFlight = 1 << (kSequenceBits - 1);

enum class ImmediateKind : int32_t { kData = 0, kSignal = 1, kAcknowledgement = 2, kStore = 3 };

// What `decode` finds wrong.
enum class ImmediateFault : int32_t { kNone, kRanks, kSource, kCounter, kAmount };

struct Immediate {
  ImmediateKind kind = ImmediateKind::kData;
  int32_t source = 0;
  int32_t counter = 0;    // of data and signals
  uint32_t sequence = 0;  // of data, signals and stores
  uint32_t amount = 0;  // parts, amount of the signal, or messages accepted in order; 1 of a store
};

struct DecodedImmediate {
  Immediate immediate;   // valid only if `fault` is kNone
  ImmediateFault fault;  // the first field that no sender writes
};

struct EncodedImmediate {
  uint32_t word;
  bool fits;  // whether every field is within its width; if not, `word` is invalid for a receiver
};

// The fields' widths in a job of `ranks` ranks.
struct ImmediateLayout {
  int32_t ranks;
  int32_t rank_bits;

  // `ranks` outside of 1 to kMostProxyRanks makes a layout whose `valid()` is false. Such a layout
  // encodes nothing and finds a fault in every word.
  FANFOLD_HD static constexpr ImmediateLayout of(int32_t ranks) {
    ImmediateLayout layout{ranks, 0};
    if (!layout.valid()) return layout;
    while ((int32_t{1} << layout.rank_bits) < ranks) ++layout.rank_bits;
    return layout;
  }

  FANFOLD_HD constexpr bool valid() const { return ranks >= 1 && ranks <= kMostProxyRanks; }

  FANFOLD_HD constexpr int32_t amount_bits() const {
    return 32 - kKindBits - rank_bits - kCounterBits - kSequenceBits;
  }
  FANFOLD_HD constexpr int32_t acknowledgement_bits() const { return 32 - kKindBits - rank_bits; }
  // The most parts of a message, and the largest amount of a signal.
  FANFOLD_HD constexpr uint32_t most_amount() const { return mask(amount_bits()); }
  FANFOLD_HD constexpr uint32_t acknowledgement_mask() const {
    return mask(acknowledgement_bits());
  }

  FANFOLD_HD constexpr EncodedImmediate encode(const Immediate& immediate) const {
    const Immediate& i = immediate;
    if (!valid() || i.source < 0 || i.source >= ranks) return kUnfit;
    if (i.kind < ImmediateKind::kData || i.kind > ImmediateKind::kStore) return kUnfit;
    const uint32_t head = static_cast<uint32_t>(i.kind) | static_cast<uint32_t>(i.source)
                                                              << kKindBits;
    const int32_t body = kKindBits + rank_bits;
    if (i.kind == ImmediateKind::kAcknowledgement) {
      if (i.amount > acknowledgement_mask()) return kUnfit;
      return {head | i.amount << body, true};
    }
    if (i.kind == ImmediateKind::kStore && (i.counter != 0 || i.amount != 1)) return kUnfit;
    if (i.counter < 0 || i.counter >= kCounters || i.sequence > mask(kSequenceBits)) return kUnfit;
    if (i.amount < 1 || i.amount > most_amount()) return kUnfit;
    return {head | static_cast<uint32_t>(i.counter) << body | i.sequence << (body + kCounterBits) |
                i.amount << (body + kCounterBits + kSequenceBits),
            true};
  }

  FANFOLD_HD constexpr DecodedImmediate decode(uint32_t word) const {
    Immediate i;
    i.kind = static_cast<ImmediateKind>(word & mask(kKindBits));
    if (!valid()) return {i, ImmediateFault::kRanks};
    i.source = static_cast<int32_t>(word >> kKindBits & mask(rank_bits));
    if (i.source >= ranks) return {i, ImmediateFault::kSource};
    const uint32_t body = word >> (kKindBits + rank_bits);
    if (i.kind == ImmediateKind::kAcknowledgement) {
      i.amount = body;
      return {i, ImmediateFault::kNone};
    }
    i.counter = static_cast<int32_t>(body & mask(kCounterBits));
    i.sequence = body >> kCounterBits & mask(kSequenceBits);
    i.amount = body >> (kCounterBits + kSequenceBits);
    const bool store = i.kind == ImmediateKind::kStore;
    if (store && i.counter != 0) return {i, ImmediateFault::kCounter};
    if (i.amount == 0 || (store && i.amount != 1)) return {i, ImmediateFault::kAmount};
    return {i, ImmediateFault::kNone};
  }

 private:
  static constexpr int32_t kKindBits = 2;
  static constexpr int32_t kCounterBits = 4;
  // A store with a counter, which every receiver refuses.
  static constexpr EncodedImmediate kUnfit{0xffffffffu, false};

  FANFOLD_HD static constexpr uint32_t mask(int32_t bits) { return (uint32_t{1} << bits) - 1; }
};

// The parts of a write command of `bytes` bytes: what its counter grows by. Both sides call this
// function, so that a consumer knows which count to wait for. `part_bytes` is at least 1.
FANFOLD_HD constexpr int64_t parts_of(int64_t bytes, int64_t part_bytes) {
  return bytes <= part_bytes ? 1 : ceil_div(bytes, part_bytes);
}

static_assert(ImmediateLayout::of(1).rank_bits == 0);
static_assert(ImmediateLayout::of(65).rank_bits == 7);
static_assert(ImmediateLayout::of(64).amount_bits() == 12);
static_assert(ImmediateLayout::of(kMostProxyRanks).amount_bits() == 6);
static_assert(ImmediateLayout::of(kMostProxyRanks).acknowledgement_bits() == 18);
static_assert(!ImmediateLayout::of(0).valid() && !ImmediateLayout::of(kMostProxyRanks + 1).valid());
static_assert(parts_of(0, 4) == 1 && parts_of(4, 4) == 1 && parts_of(5, 4) == 2);

}  // namespace fanfold
