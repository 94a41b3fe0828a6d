// Rings: many producers and one consumer, full rings, torn stores, counts that wrap.
#include <sys/mman.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.hpp"
#include "memory/region.h"
#include "protocol/ring.h"
#include "ranks.hpp"
#include "ring/command.h"
#include "ring/host_memory.h"
#include "ring/ring.h"

using namespace fanfold;
using namespace std::chrono_literals;

namespace {

constexpr auto kPatience = std::chrono::seconds(30);  // far beyond any real wait

// First tickets before everything that wraps: nothing, 32 bits, the lap bit of 8 slots, 64 bits.
constexpr std::array<uint64_t, 5> kFirsts = {0, (uint64_t{1} << 32) - 3, 13, ~uint64_t{0} - 4,
                                             (uint64_t{1} << 63) - 2};

// The `number`-th command of a producer. Every bit field depends on the number.
Command command_of(int32_t producer, uint64_t number) {
  return make_command({.kind = CommandKind::kWrite,
                       .peer = producer,
                       .counter = static_cast<int64_t>(number % 16),
                       .bytes = static_cast<int64_t>(number % 0xffffffffu),
                       .source = static_cast<int64_t>(number * 7 % 0x7fffffffu) * 16,
                       .target = static_cast<int64_t>(number * 11 % 0xffffffffu) * 16});
}

bool same(const Command& a, const Command& b) {
  return a.words[0] == b.words[0] && a.words[1] == b.words[1];
}

// Pushes `count` commands from each of several threads while this thread pops all of them. Every
// command is the producer's next one.
void run_producers(const Ring& ring, int32_t producers, uint64_t count, uint64_t batch) {
  Producer producer(ring);
  Consumer consumer(ring);
  const uint64_t first = consumer.popped();
  on_ranks(producers + 1, [&](int32_t rank) {
    if (rank < producers) {
      uint64_t before = 0;
      for (uint64_t i = 0; i < count; ++i) {
        const uint64_t ticket = producer.push(command_of(rank, i), kPatience);
        CHECK(i == 0 || static_cast<int64_t>(ticket - before) > 0);
        before = ticket;
      }
      return;
    }
    std::vector<uint64_t> next(static_cast<size_t>(producers), 0);
    const auto start = std::chrono::steady_clock::now();
    while (consumer.popped() - first < count * static_cast<uint64_t>(producers)) {
      Command command{};
      if (!consumer.pop(command)) {
        consumer.publish();
        CHECK(std::chrono::steady_clock::now() - start < 2 * kPatience);
        std::this_thread::yield();
        continue;
      }
      const int64_t from = command.fields().peer;
      CHECK(from >= 0 && from < producers);
      CHECK(
          same(command, command_of(static_cast<int32_t>(from), next[static_cast<size_t>(from)]++)));
      if (consumer.popped() - consumer.published() == batch) consumer.publish();
    }
    consumer.publish();
    for (const uint64_t popped : next) CHECK_EQ(popped, count);
    Command none{};
    CHECK(!consumer.pop(none));
  });
  CHECK_EQ(producer.consumed(), first + count * static_cast<uint64_t>(producers));
}

}  // namespace

TEST(ring_layout_keeps_writers_on_lines_of_their_own) {
  std::vector<uint64_t> memory(8192);
  const RingView ring = RingLayout{8}.view(memory.data());
  const auto offset = [&](const void* place) {
    return static_cast<const std::byte*>(place) - reinterpret_cast<const std::byte*>(memory.data());
  };
  CHECK_EQ(offset(&ring.head->next), 128);
  CHECK_EQ(offset(&ring.head->consumed), 136);  // producers read both
  CHECK_EQ(offset(&ring.tail->consumed), 256);
  CHECK_EQ(offset(&ring.faults->abandoned), 384);
  CHECK_EQ(offset(ring.losses()->peers), 512);
  CHECK_EQ(offset(ring.questions()->peers), 640);
  CHECK_EQ(offset(ring.slot(0)), 4736);
  CHECK_EQ(offset(ring.slot(7)), 4736 + 7 * 16);
  CHECK_EQ(offset(ring.slot(8)), 4736);
  CHECK_EQ(RingLayout{8}.bytes(), 4736 + 128);
  CHECK_EQ(RingLayout{16}.bytes(), 4736 + 256);
  for (const uint64_t lap : {uint64_t{0}, uint64_t{1}, uint64_t{2}}) {
    CHECK_EQ(ring.lap(8 * lap), 1 - lap % 2);
    CHECK_EQ(ring.lap(8 * lap + 7), 1 - lap % 2);
  }
}

TEST(ring_sizes_outside_the_bounds_are_refused) {
  for (const int64_t slots :
       {int64_t{-2}, int64_t{0}, int64_t{1}, int64_t{3}, int64_t{1000}, int64_t{1} << 31}) {
    CHECK_THROWS(Ring::create(slots), BadArgument);
  }
  CHECK_EQ(Ring::create(2).slots(), 2);
  constexpr auto bytes = RingLayout{4}.bytes();
  alignas(128) std::array<std::byte, bytes + 128> memory{};
  CHECK_THROWS(Ring::create_in(memory.data(), bytes - 1, 4), BadArgument);
  CHECK_THROWS(Ring::create_in(memory.data() + 16, bytes, 4), BadArgument);
  CHECK_THROWS(Ring::create_in(nullptr, bytes, 4), BadArgument);
  CHECK_THROWS(Ring::attach(memory.data(), bytes), BadArgument);  // nobody has made one
  Ring::create_in(memory.data(), bytes, 4);
  CHECK_EQ(Ring::attach(memory.data(), bytes).slots(), 4);
  CHECK_THROWS(Ring::attach(memory.data(), bytes - 1), BadArgument);
  CHECK_THROWS(Ring::attach(memory.data(), 64), BadArgument);
  reinterpret_cast<RingIdentity*>(memory.data())->slots = 5;
  CHECK_THROWS(Ring::attach(memory.data(), bytes), BadArgument);
}

TEST(ring_pops_in_order_over_several_laps) {
  for (const uint64_t first : kFirsts) {
    for (const int64_t slots : {2, 8}) {
      const Ring ring = Ring::create(slots, first);
      Producer producer(ring);
      Consumer consumer(ring);
      Command command{};
      for (uint64_t i = 0; i < 40; ++i) {
        CHECK(!consumer.pop(command));
        const std::optional<uint64_t> ticket = producer.try_push(command_of(1, i));
        CHECK(ticket == first + i);
        CHECK(consumer.pop(command));
        CHECK(same(command, command_of(1, i)));
        CHECK_EQ(producer.consumed(), first + i);  // popped, but not published
        consumer.publish();
        CHECK_EQ(producer.consumed(), first + i + 1);
      }
    }
  }
}

TEST(ring_that_is_full_takes_nothing_until_a_slot_is_published) {
  for (const uint64_t first : kFirsts) {
    const Ring ring = Ring::create(8, first);
    Producer producer(ring);
    Consumer consumer(ring);
    for (uint64_t i = 0; i < 8; ++i) CHECK(producer.try_push(command_of(0, i)).has_value());
    Command command{};
    for (uint64_t i = 0; i < 20; ++i) {
      CHECK(!producer.try_push(command_of(0, i + 8)).has_value());
      CHECK(consumer.pop(command));
      CHECK(same(command, command_of(0, i)));
      // A command that has been popped still occupies its slot.
      CHECK(!producer.try_push(command_of(0, i + 8)).has_value());
      consumer.publish();
      CHECK(producer.try_push(command_of(0, i + 8)) == first + i + 8);
    }
  }
}

TEST(ring_publishes_late_and_in_part) {
  const Ring ring = Ring::create(4);
  Producer producer(ring);
  Consumer consumer(ring);
  Command command{};
  for (uint64_t i = 0; i < 4; ++i) CHECK(producer.try_push(command_of(0, i)).has_value());
  for (int i = 0; i < 3; ++i) CHECK(consumer.pop(command));
  consumer.publish(1);
  CHECK_EQ(consumer.published(), 1u);
  CHECK_EQ(consumer.popped(), 3u);
  CHECK_EQ(producer.consumed(), 1u);
  CHECK(producer.try_push(command_of(0, 4)).has_value());
  CHECK(!producer.try_push(command_of(0, 5)).has_value());
  CHECK_THROWS(consumer.publish(0), BadArgument);
  CHECK_THROWS(consumer.publish(4), BadArgument);
  consumer.publish(1);  // changes nothing
  consumer.publish();
  CHECK_EQ(producer.consumed(), 3u);
  // A consumer that takes over continues behind what has been published.
  CHECK_EQ(Consumer(ring).popped(), 3u);
}

TEST(ring_that_stays_full_ends_the_push_with_the_counts) {
  const Ring ring = Ring::create(2, 5);
  Producer producer(ring);
  Consumer consumer(ring);
  Command command{};
  producer.push(command_of(0, 0), kPatience);
  producer.push(command_of(0, 1), kPatience);
  CHECK(consumer.pop(command));
  try {
    producer.push(command_of(0, 2), 50ms);
    CHECK(false);
  } catch (const RingFull& error) {
    CHECK_EQ(error.report.slots, 2);
    CHECK_EQ(error.report.pushed, 7u);
    CHECK_EQ(error.report.consumed, 5u);
    CHECK(error.report.seconds >= 0.05);
    CHECK(std::string(error.what()).find("7 pushed, 5 consumed") != std::string::npos);
  }
  // The push that failed has left no trace.
  consumer.publish();
  CHECK_EQ(producer.push(command_of(0, 3), kPatience), 7u);
  CHECK(consumer.pop(command));
  CHECK(same(command, command_of(0, 1)));
  CHECK(consumer.pop(command));
  CHECK(same(command, command_of(0, 3)));
}

// A reader sees only one of the two words of a store, whichever: it waits for the other.
TEST(ring_pops_no_torn_command) {
  for (const uint64_t first : kFirsts) {
    for (const int late : {0, 1}) {
      const Ring ring = Ring::create(2, first);
      Consumer consumer(ring);
      const RingView& view = ring.view();
      for (uint64_t i = 0; i < 6; ++i) {
        const uint64_t ticket = first + i;
        const Command whole = command_of(0, i).with_lap(view.lap(ticket));
        Command command{{1, 2}};
        view.slot(ticket)->words[1 - late] = whole.words[1 - late];
        CHECK(!consumer.pop(command));
        CHECK(command.words[0] == 1 && command.words[1] == 2);
        CHECK_EQ(consumer.popped(), ticket);
        view.slot(ticket)->words[late] = whole.words[late];
        CHECK(consumer.pop(command));
        CHECK(same(command, command_of(0, i)));
        consumer.publish();
      }
    }
  }
}

namespace {

struct ExpiresAfter {
  int questions;
  bool expired() { return --questions < 0; }
};

}  // namespace

// The push of GPU threads takes its ticket first.
TEST(ring_push_with_a_ticket_taken_first) {
  for (const uint64_t first : kFirsts) {
    const Ring ring = Ring::create(2, first);
    Producer producer(ring);
    Consumer consumer(ring);
    HostMemory memory;
    ExpiresAfter deadline{3};
    uint64_t ticket = 0;
    CHECK(ring_push(ring.view(), memory, command_of(0, 0), deadline, ticket));
    CHECK_EQ(ticket, first);
    CHECK(producer.try_push(command_of(0, 1)) == first + 1);  // both ways mix
    Command command{};
    CHECK(consumer.pop(command));
    CHECK(!ring_push(ring.view(), memory, command_of(0, 2), deadline, ticket));
    CHECK_EQ(ticket, first + 2);
    CHECK_EQ(deadline.questions, -1);
    CHECK_EQ(consumer.abandoned(), 1u);
    // The ticket is lost, and with it what is pushed behind it.
    consumer.publish();
    CHECK(!producer.try_push(command_of(0, 3)).has_value());
    CHECK(consumer.pop(command));
    CHECK(same(command, command_of(0, 1)));
    CHECK(!consumer.pop(command));
    consumer.publish();
    CHECK(producer.try_push(command_of(0, 4)).has_value());
    CHECK(!consumer.pop(command));
  }
}

TEST(ring_many_producers_lose_nothing) {
  constexpr uint64_t kCount = 30000 / kRoundsShare;
  for (const int64_t slots : {2, 16, 1024}) {
    for (const int32_t producers : {1, 2, 4}) {
      run_producers(Ring::create(slots), producers, slots == 2 ? kCount / 10 : kCount, 1);
    }
  }
}

TEST(ring_many_producers_while_the_counts_wrap) {
  for (const uint64_t first : kFirsts) {
    run_producers(Ring::create(8, first), 3, 3000 / kRoundsShare, 5);
  }
}

// Two mappings at different addresses, as two processes have them.
TEST(ring_in_memory_that_is_mapped_twice) {
  const Ring ring = Ring::create(4);
  const Region again = Region::open(getpid(), ring.region().descriptor(), ring.region().bytes());
  CHECK(again.data() != ring.region().data());
  const Ring mapped = Ring::attach(again.data(), again.bytes());
  Producer near(ring);
  Producer far(mapped);
  Consumer consumer(mapped);
  Command command{};
  for (uint64_t i = 0; i < 20; i += 2) {
    CHECK(near.try_push(command_of(0, i)) == i);
    CHECK(far.try_push(command_of(0, i + 1)) == i + 1);
    for (uint64_t j = i; j < i + 2; ++j) {
      CHECK(consumer.pop(command));
      CHECK(same(command, command_of(0, j)));
    }
    consumer.publish();
  }
}

namespace {

// Calls `ready` until it returns true. The test fails if that takes too long.
template <typename Ready>
void await(const Ready& ready) {
  const auto start = std::chrono::steady_clock::now();
  while (!ready()) {
    CHECK(std::chrono::steady_clock::now() - start < kPatience);
    std::this_thread::yield();
  }
}

}  // namespace

// Beside each slot lies a row that is no atomic. A producer writes it once there is room for its
// ticket, the consumer reads it before it publishes, and TSAN checks that the ring orders the two
// in both directions, also for a producer that has read only the copy of the count.
TEST(ring_orders_the_rows_beside_its_slots) {
  constexpr uint64_t kCount = 40000 / kRoundsShare;
  constexpr uint64_t kSlots = 8;
  const Ring ring = Ring::create(kSlots);
  const RingView& view = ring.view();
  std::array<uint64_t, kSlots> rows{};
  on_ranks(3, [&](int32_t rank) {
    HostMemory memory;
    Consumer consumer(ring);
    for (uint64_t i = 0; i < (rank == 0 ? 2 * kCount : kCount); ++i) {
      if (rank == 0) {
        Command command{};
        await([&] { return consumer.pop(command); });
        CHECK(same(command, command_of(0, i)));
        CHECK_EQ(rows[i % kSlots], i);
        consumer.publish();
      } else {
        const uint64_t ticket = ring_take_tickets(view, memory, 1);
        await([&] { return ring_has_room(view, memory, ticket); });
        rows[ticket % kSlots] = ticket;
        ring_store(view, memory, ticket, command_of(0, ticket));
      }
    }
  });
}
