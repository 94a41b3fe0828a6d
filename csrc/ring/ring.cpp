#include "ring/ring.h"

#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/atomics.h"
#include "base/error.h"
#include "base/wait.h"
#include "protocol/ring.h"
#include "ring/host_memory.h"

namespace fanfold {
namespace {

// Attempts of one try_push while other producers take the tickets.
constexpr int kAttempts = 64;

// A ring is full for as long as the consumer needs for a few commands, or for long.
constexpr std::chrono::microseconds kSpin{20};
constexpr std::chrono::milliseconds kIdle{1};

constexpr HostMemory kMemory;

void check_slots(int64_t slots) {
  if (RingLayout::allows(slots)) return;
  throw BadArgument("slots", std::to_string(slots),
                    "a power of two from " + std::to_string(kMinRingSlots) + " to " +
                        std::to_string(kMaxRingSlots));
}

void check_memory(const std::byte* memory, int64_t bytes, int64_t needed) {
  if (memory == nullptr || reinterpret_cast<uintptr_t>(memory) % kAreaAlignment != 0) {
    throw BadArgument("memory", memory == nullptr ? "null" : "not aligned",
                      "aligned to " + std::to_string(kAreaAlignment) + " bytes");
  }
  if (bytes < needed) {
    throw BadArgument("bytes", std::to_string(bytes), "at least " + std::to_string(needed));
  }
}

// Writes a ring into fresh memory, or over one that nobody uses any more.
RingView initialise(std::byte* memory, int64_t slots, uint64_t first) {
  const RingView view = RingLayout{slots}.view(memory);
  auto* header = new (memory) RingHeader{};
  header->head = {.next = first, .consumed = first};
  header->tail = {.consumed = first};
  header->identity = {.mark = 0, .slots = static_cast<uint64_t>(slots), .first = first};
  // A slot is empty while it has the other lap bit than its next ticket.
  for (uint64_t ticket = first; ticket != first + view.slots; ++ticket) {
    new (view.slot(ticket)) Command(Command{}.with_lap(1 - view.lap(ticket)));
  }
  kMemory.store_release_system(&header->identity.mark, kRingMark);
  return view;
}

}  // namespace

Ring::Ring(const RingView& view, Region region) : view_(view), region_(std::move(region)) {}

Ring Ring::create(int64_t slots, uint64_t first) {
  check_slots(slots);
  Region region = Region::create(RingLayout{slots}.bytes());
  const RingView view = initialise(region.data(), slots, first);
  return Ring(view, std::move(region));
}

Ring Ring::create_in(std::byte* memory, int64_t bytes, int64_t slots, uint64_t first) {
  check_slots(slots);
  check_memory(memory, bytes, RingLayout{slots}.bytes());
  return Ring(initialise(memory, slots, first), Region());
}

Ring Ring::attach(std::byte* memory, int64_t bytes) {
  check_memory(memory, bytes, static_cast<int64_t>(sizeof(RingHeader)));
  const auto* identity = reinterpret_cast<const RingIdentity*>(memory);
  if (kMemory.load_acquire_system(&identity->mark) != kRingMark) {
    throw BadArgument("memory", "without a ring", "memory in which this version made a ring");
  }
  const auto slots = static_cast<int64_t>(kMemory.load_relaxed_system(&identity->slots));
  check_slots(slots);
  check_memory(memory, bytes, RingLayout{slots}.bytes());
  return Ring(RingLayout{slots}.view(memory), Region());
}

std::optional<uint64_t> Producer::try_push(const Command& command) {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const RingPush push = ring_try_push(ring_, kMemory, command);
    if (push.outcome == RingOutcome::kPushed) return push.ticket;
    if (push.outcome == RingOutcome::kFull) return std::nullopt;
  }
  return std::nullopt;
}

uint64_t Producer::push(const Command& command, std::chrono::nanoseconds timeout) {
  uint64_t ticket = 0;
  const auto pushed = [&] {
    const std::optional<uint64_t> taken = try_push(command);
    ticket = taken.value_or(0);
    return taken.has_value();
  };
  if (pushed()) return ticket;
  const auto start = std::chrono::steady_clock::now();
  if (poll_until(pushed, {.timeout = timeout, .spin = kSpin, .idle = kIdle})) return ticket;
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
  throw RingFull({.slots = static_cast<int64_t>(ring_.slots),
                  .pushed = kMemory.load_relaxed_system(&ring_.head->next),
                  .consumed = consumed(),
                  .seconds = waited.count()});
}

uint64_t Producer::consumed() const { return kMemory.load_acquire_system(&ring_.tail->consumed); }

Consumer::Consumer(const Ring& ring)
    : ring_(ring.view()), popped_(kMemory.load_acquire_system(&ring_.tail->consumed)),
      published_(popped_) {}

bool Consumer::pop(Command& command) {
  if (!ring_load(ring_, kMemory, popped_, command)) return false;
  ++popped_;
  return true;
}

bool Consumer::has_command() const {
  Command command;
  return ring_load(ring_, kMemory, popped_, command);
}

void Consumer::publish(uint64_t count) {
  if (count - published_ > popped_ - published_) {
    throw BadArgument("count", std::to_string(count),
                      std::to_string(published_) + " to " + std::to_string(popped_) +
                          ", what has been published and what has been popped");
  }
  published_ = count;
  ring_publish(ring_, kMemory, count);
}

uint64_t Consumer::abandoned() const {
  return kMemory.load_relaxed_system(&ring_.faults->abandoned);
}

void Consumer::tell_lost(int32_t peer) {
  uint64_t* word = &ring_.losses()->peers[peer / 64];
  const uint64_t bit = uint64_t{1} << (peer % 64);
  kMemory.store_release_system(word, kMemory.load_relaxed_system(word) | bit);
}

bool Consumer::take_question(int32_t peer) {
  uint32_t* word = &ring_.questions()->peers[peer];
  if (load_relaxed_system(word) == 0) return false;
  store_relaxed_system(word, uint32_t{0});
  return true;
}

}  // namespace fanfold
