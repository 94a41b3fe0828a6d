// How commands get into a ring and out of it: one algorithm for CPU threads and GPU threads.
//
// `Memory` performs the accesses. It has these functions, with the names and the meaning of
// csrc/base/atomics.h and device/memory.cuh: load_relaxed_system, load_acquire_system,
// store_release_system, store_pair_release_system, compare_exchange_relaxed_system and
// fetch_add_relaxed_system. Tests explore the algorithm with a `Memory` of their own.
//
// A producer gets a ticket in one of two ways, which may be mixed in one ring:
//
//   ring_try_push  takes the ticket only if the ticket's slot is free. A push that fails changes
//                  nothing. Producers that race repeat the attempt, so this suits few producers.
//   ring_push      takes the ticket with one atomic add, then waits for the slot. Any number of
//                  producers get their tickets at once. If the wait fails, the ticket is abandoned:
//                  the consumer never passes it, and the ring is lost.
#pragma once

#include "layout/ring.h"

namespace fanfold {

enum class RingOutcome : int32_t {
  kPushed,
  kFull,
  kRaced,  // another producer took the ticket; try again
};

struct RingPush {
  RingOutcome outcome;
  uint64_t ticket;  // of kPushed
};

// Whether the command that used the ticket's slot one lap before has been consumed. Reads the
// consumer's count, which may lie across PCIe, only if the copy says that it has not.
//
// The loads acquire: the store of the new command must come after the consumer's loads of the old
// one. The copy is released, so that it hands this order on to producers that read only the copy.
// A producer that is slow may set the copy back; then a producer reads the count once more.
template <class Memory>
FANFOLD_HD bool ring_has_room(const RingView& ring, Memory& memory, uint64_t ticket) {
  const auto slots = static_cast<int64_t>(ring.slots);
  const uint64_t copy = memory.load_acquire_system(&ring.head->consumed);
  if (static_cast<int64_t>(ticket - copy) < slots) return true;
  const uint64_t consumed = memory.load_acquire_system(&ring.tail->consumed);
  if (consumed != copy) memory.store_release_system(&ring.head->consumed, consumed);
  return static_cast<int64_t>(ticket - consumed) < slots;
}

// Stores the command into the ticket's free slot. The store releases what the producer has written
// before. A reader may see either word first.
template <class Memory>
FANFOLD_HD void ring_store(const RingView& ring, Memory& memory, uint64_t ticket,
                           const Command& command) {
  const Command whole = command.with_lap(ring.lap(ticket));
  memory.store_pair_release_system(ring.slot(ticket)->words, whole.words[0], whole.words[1]);
}

// Takes so many tickets that follow each other if all of their slots are free, and returns the
// first. If not, changes nothing. `count` is at most `ring.slots`.
template <class Memory>
FANFOLD_HD RingPush ring_try_take_tickets(const RingView& ring, Memory& memory, uint64_t count) {
  uint64_t ticket = memory.load_relaxed_system(&ring.head->next);
  if (!ring_has_room(ring, memory, ticket + count - 1)) return {RingOutcome::kFull, 0};
  if (!memory.compare_exchange_relaxed_system(&ring.head->next, ticket, ticket + count)) {
    return {RingOutcome::kRaced, 0};
  }
  return {RingOutcome::kPushed, ticket};
}

template <class Memory>
FANFOLD_HD RingPush ring_try_push(const RingView& ring, Memory& memory, const Command& command) {
  const RingPush taken = ring_try_take_tickets(ring, memory, 1);
  if (taken.outcome == RingOutcome::kPushed) ring_store(ring, memory, taken.ticket, command);
  return taken;
}

// The first of so many tickets that follow each other.
template <class Memory>
FANFOLD_HD uint64_t ring_take_tickets(const RingView& ring, Memory& memory, uint64_t count) {
  return memory.fetch_add_relaxed_system(&ring.head->next, count);
}

// Stores the command of a ticket that has been taken, if the slot is free. Returns whether it was.
template <class Memory>
FANFOLD_HD bool ring_try_store(const RingView& ring, Memory& memory, uint64_t ticket,
                               const Command& command) {
  if (!ring_has_room(ring, memory, ticket)) return false;
  ring_store(ring, memory, ticket, command);
  return true;
}

// Stores the command of a ticket that has been taken once the slot is free. Returns false, and
// abandons the ticket, if `deadline.expired()` returned true, which is asked after each look at a
// full ring.
template <class Memory, class Deadline>
FANFOLD_HD bool ring_store_or_abandon(const RingView& ring, Memory& memory, uint64_t ticket,
                                      const Command& command, Deadline& deadline) {
  while (!ring_try_store(ring, memory, ticket, command)) {
    if (!deadline.expired()) continue;
    memory.fetch_add_relaxed_system(&ring.faults->abandoned, uint64_t{1});
    return false;
  }
  return true;
}

// Pushes the command and sets its ticket. Returns false as `ring_store_or_abandon` does.
template <class Memory, class Deadline>
FANFOLD_HD bool ring_push(const RingView& ring, Memory& memory, const Command& command,
                          Deadline& deadline, uint64_t& ticket) {
  ticket = ring_take_tickets(ring, memory, 1);
  return ring_store_or_abandon(ring, memory, ticket, command, deadline);
}

// Sets `command` to that of the ticket, with lap bits of 0, if both of its words are in the slot.
// Returns whether they are. The caller has consumed all tickets before this one.
template <class Memory>
FANFOLD_HD bool ring_load(const RingView& ring, Memory& memory, uint64_t ticket, Command& command) {
  const Command* slot = ring.slot(ticket);
  Command seen{{memory.load_acquire_system(&slot->words[0]), 0}};
  if ((seen.words[0] & 1u) != ring.lap(ticket)) return false;
  seen.words[1] = memory.load_acquire_system(&slot->words[1]);
  if (!seen.has_lap(ring.lap(ticket))) return false;
  command = seen.with_lap(0);
  return true;
}

// Frees the slots of all tickets before `count`. The store releases the loads of their commands.
template <class Memory>
FANFOLD_HD void ring_publish(const RingView& ring, Memory& memory, uint64_t count) {
  memory.store_release_system(&ring.tail->consumed, count);
}

}  // namespace fanfold
