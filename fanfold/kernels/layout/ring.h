// A ring of commands in memory that producers and one consumer share: threads, processes, GPUs. The
// memory holds no pointers, so each side may map it at another address.
//
// A *ticket* counts the commands of a ring. The command with ticket t lies in slot t % slots, and
// its lap bit says whether the slot holds the command of this lap or of the one before. Tickets are
// 64 bits wide and may start anywhere; they are compared by distance.
//
// protocol/ring.h has the algorithm.
#pragma once

#include "layout/command.h"
#include "layout/types.h"

namespace fanfold {

inline constexpr int64_t kMinRingSlots = 2;
inline constexpr int64_t kMaxRingSlots = int64_t{1} << 30;
inline constexpr uint64_t kRingMark = 0x30676e6972666e66ull;  // "fnfring0", little endian

// What a ring is; written once, before anybody else maps the memory.
struct alignas(kAreaAlignment) RingIdentity {
  uint64_t mark;   // kRingMark
  uint64_t slots;  // a power of two
  uint64_t first;  // the first ticket
};

// The producers' line. Where all producers are on one GPU, it lies in that GPU's memory.
struct alignas(kAreaAlignment) RingHead {
  uint64_t next;      // the next ticket
  uint64_t consumed;  // a copy of the consumer's count, which may lag behind
};

// The consumer's line.
struct alignas(kAreaAlignment) RingTail {
  uint64_t consumed;  // commands with lower tickets are done, and their slots are free
};

// Tickets that were taken and will never be stored: the consumer cannot pass them.
struct alignas(kAreaAlignment) RingFaults {
  uint64_t abandoned;
};

// Peers from which nothing comes any more, for producers that wait for their answers. The consumer
// writes it; what came from a peer before is there when its bit is.
struct alignas(kAreaAlignment) RingLosses {
  uint64_t peers[16];  // bit p % 64 of word p / 64

  static constexpr int32_t kMostPeers = 16 * 64;
};

// Peers for which producers have waited so long that they ask whether those still run: not 0. The
// consumer sets a word back when it looks into that.
struct alignas(kAreaAlignment) RingQuestions {
  uint32_t peers[RingLosses::kMostPeers];
};

struct RingHeader {
  RingIdentity identity;
  RingHead head;
  RingTail tail;
  RingFaults faults;
  RingLosses losses;
  RingQuestions questions;
};

static_assert(sizeof(RingIdentity) == 128 && sizeof(RingHead) == 128);
static_assert(sizeof(RingTail) == 128 && sizeof(RingFaults) == 128 && sizeof(RingLosses) == 128);
static_assert(sizeof(RingQuestions) == 4096);
static_assert(sizeof(RingHeader) == 5 * 128 + 4096 && alignof(RingHeader) == 128);

// A ring as its users address it.
struct RingView {
  RingHead* head;
  RingTail* tail;
  RingFaults* faults;
  Command* commands;
  uint64_t slots;

  // Behind the faults, in one memory with them.
  FANFOLD_HD RingLosses* losses() const { return reinterpret_cast<RingLosses*>(faults + 1); }
  FANFOLD_HD RingQuestions* questions() const {
    return reinterpret_cast<RingQuestions*>(losses() + 1);
  }

  FANFOLD_HD constexpr Command* slot(uint64_t ticket) const {
    return commands + (ticket & (slots - 1));
  }
  // Fresh memory is 0, so the lap that begins with ticket 0 has the bit 1.
  FANFOLD_HD constexpr uint64_t lap(uint64_t ticket) const {
    return (ticket & slots) == 0 ? 1u : 0u;
  }
};

// The memory of a ring: the header, then the slots.
struct RingLayout {
  int64_t slots;

  FANFOLD_HD static constexpr bool allows(int64_t slots) {
    return slots >= kMinRingSlots && slots <= kMaxRingSlots && (slots & (slots - 1)) == 0;
  }
  FANFOLD_HD static constexpr int64_t commands_offset() {
    return static_cast<int64_t>(sizeof(RingHeader));
  }
  FANFOLD_HD constexpr int64_t bytes() const {
    return align_up(commands_offset() + slots * static_cast<int64_t>(sizeof(Command)),
                    kAreaAlignment);
  }
  // `memory` is aligned to 128 bytes.
  FANFOLD_HD RingView view(void* memory) const {
    auto* header = static_cast<RingHeader*>(memory);
    auto* commands =
        reinterpret_cast<Command*>(static_cast<unsigned char*>(memory) + commands_offset());
    return {&header->head, &header->tail, &header->faults, commands, static_cast<uint64_t>(slots)};
  }
};

static_assert(RingLayout::commands_offset() % kAreaAlignment == 0);
static_assert(RingLayout{2}.bytes() == 5 * 128 + 4096 + 128);
static_assert(RingLayout{1024}.bytes() == 5 * 128 + 4096 + 1024 * 16);

}  // namespace fanfold
