// The loopback network: the contract of every transport, and what each of its options does.
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.hpp"
#include "loopback_world.hpp"
#include "transport/loopback.h"
#include "transport/loopback_plan.h"
#include "transport_contract.hpp"

using namespace fanfold;
using namespace fanfold::transport;
using namespace fanfold::transport::loopback;
using contract::index;
using contract::World;

namespace {

contract::Ranks make_with(Options options, int32_t ranks, int32_t rails) {
  options.rails = rails;
  return on(Network::create(options))(ranks, rails);
}

contract::Ranks ideal(int32_t ranks, int32_t rails) { return make_with(Options{}, ranks, rails); }

contract::Ranks hostile(int32_t ranks, int32_t rails) {
  return make_with(Options::hostile(static_cast<uint64_t>(int64_t{7} * ranks + rails)), ranks,
                   rails);
}

// Faults without the target's poll, into short receive queues.
contract::Ranks unpolled(int32_t ranks, int32_t rails) {
  Options options = Options::hostile(3);
  options.lands_without_poll = true;
  options.receive_queue = 4;
  options.arrivals_name_peer = true;
  return make_with(options, ranks, rails);
}

// Narrow links with a short buffer, so that packets are dropped.
contract::Ranks narrow(int32_t ranks, int32_t rails) {
  Options options = Options::hostile(4);
  options.poll_ns = 5'000;
  options.link = {.bytes_per_us = 10'000,
                  .buffer_bytes = 16'384,
                  .packet_bytes = 4'096,
                  .header_bytes = 64,
                  .retransmit_ns = 50'000};
  return make_with(options, ranks, rails);
}

}  // namespace

TRANSPORT_CONTRACT(loopback_ideal, ideal)
TRANSPORT_CONTRACT(loopback_hostile, hostile)
TRANSPORT_CONTRACT(loopback_unpolled, unpolled)
TRANSPORT_CONTRACT(loopback_narrow, narrow)

// --- Determinism ------------------------------------------------------------------------------

namespace {

// What happened, in numbers: time, rank, and the event.
using Log = std::vector<std::array<int64_t, 6>>;

Log run_seed(uint64_t seed) {
  constexpr int32_t kRanks = 3;
  Options options = Options::hostile(seed);
  options.rails = 2;
  options.arrivals_name_peer = true;
  const NetworkPtr network = Network::create(options);
  World world(on(network), kRanks, 2, 1 << 17);
  Random random(seed);
  Log log;
  for (int i = 0; i < 3000; ++i) {
    const int32_t rank = random.between(0, kRanks - 1);
    if (i < 100) {
      const int32_t to = (rank + random.between(1, kRanks - 1)) % kRanks;
      world.post(rank, to, random.between(0, 1), random.between(0, 2500));
    }
    std::array<Event, 3> events{};
    const int32_t count = world.transports[index(rank)]->poll(events);
    for (const Event& event : std::span(events).first(index(count))) {
      log.push_back({network->now(), rank, static_cast<int64_t>(event.kind), event.rail, event.peer,
                     event.kind == EventKind::kArrival ? int64_t{event.immediate}
                                                       : static_cast<int64_t>(event.context)});
    }
  }
  return log;
}

}  // namespace

TEST(loopback_a_seed_gives_the_same_events) {
  Log last;
  for (uint64_t seed = 0; seed < 200 / kRoundsShare; ++seed) {
    const Log log = run_seed(seed);
    CHECK(log.size() > 150);
    CHECK(log == run_seed(seed));
    CHECK(log != last);
    last = log;
  }
}

TEST(loopback_a_plan_depends_on_its_key_alone) {
  const Options options = Options::hostile(5);
  const auto delay = [&](const WriteKey& key) { return plan_write(options, key).delay; };
  const WriteKey key{1, 2, 3, 4, 5};
  CHECK_EQ(delay(key), delay({1, 2, 3, 4, 5}));
  for (const WriteKey& other : {WriteKey{0, 2, 3, 4, 5},
                                {1, 0, 3, 4, 5},
                                {1, 2, 0, 4, 5},
                                {1, 2, 3, 0, 5},
                                {1, 2, 3, 4, 0},
                                {3, 4, 1, 2, 5}}) {
    CHECK(delay(key) != delay(other));
  }
  // An option changes nothing but its own effect.
  Options changed = options;
  changed.delay.rare_one_in = 2;
  changed.stall_one_in = 0;
  changed.duplicate_one_in = 1;
  const Plan plan = plan_write(changed, key);
  CHECK_EQ(plan.completion_delay, plan_write(options, key).completion_delay);
  CHECK_EQ(plan.pieces_key, plan_write(options, key).pieces_key);
  CHECK(plan.duplicated);
  CHECK(!plan.stalls);
}

TEST(loopback_threads_meet_the_same_faults) {
  std::array<Counters, 2> counters;
  for (Counters& each : counters) {
    Options options = Options::hostile(6);
    options.stall = {.least = 0, .most = 10};
    const NetworkPtr network = Network::create(options);
    contract::threads_drive_their_ranks(on(network));
    each = network->counters();
  }
  CHECK(counters[0].stalls > 0);
  CHECK_EQ(counters[0].stalls, counters[1].stalls);
  CHECK_EQ(counters[0].landed, counters[1].landed);
}

// --- Time, order, duplicates, stalls ----------------------------------------------------------

TEST(loopback_delays_pass_in_virtual_time) {
  Options options;
  options.delay = {.least = 1000, .most = 1000};
  options.completion_delay = {.least = 500, .most = 500};
  Small small(options);
  small.network->advance(5);
  CHECK_EQ(small.network->now(), 5);
  CHECK_EQ(small.network->until_next(), -1);
  CHECK(small.world.post(0, 1, 0, 100));
  CHECK_EQ(small.network->until_next(), 1000);
  small.network->advance(999);
  CHECK_EQ(small.arrivals(1), 0);
  small.network->advance(1);
  CHECK_EQ(small.arrivals(1), 1);
  CHECK_EQ(small.completions(0), 0);
  small.network->advance(499);
  CHECK_EQ(small.completions(0), 0);
  small.network->advance(1);
  CHECK_EQ(small.completions(0), 1);
  CHECK_THROWS(small.network->advance(-1), BadArgument);
}

TEST(loopback_polls_advance_the_time_by_option) {
  Options options;
  options.poll_ns = 7;
  Small small(options);
  for (int i = 0; i < 10; ++i) small.poll(i % 2);
  CHECK_EQ(small.network->now(), 70);
}

TEST(loopback_rare_delays_are_rare) {
  Options options;
  options.delay = {.least = 10, .most = 20, .rare_one_in = 10, .rare = 1000};
  int64_t rare = 0;
  for (int64_t number = 0; number < 1000; ++number) {
    const int64_t delay = plan_write(options, {0, 0, 1, 0, number}).delay;
    CHECK((delay >= 10 && delay <= 20) || (delay >= 1010 && delay <= 1020));
    rare += delay > 1000 ? 1 : 0;
  }
  CHECK(rare > 60 && rare < 150);
}

TEST(loopback_order_is_kept_or_not_by_option) {
  for (const bool in_order : {true, false}) {
    Options options;
    options.delay = {.least = 0, .most = 1000};
    options.in_order = in_order;
    Small small(options);
    for (int i = 0; i < 50; ++i) CHECK(small.world.post(0, 1, 0, 8));
    small.network->advance(1000);
    const std::vector<Event> events = small.poll(1);
    CHECK_EQ(events.size(), 50u);
    const bool sorted =
        std::is_sorted(events.begin(), events.end(),
                       [](const Event& a, const Event& b) { return a.immediate < b.immediate; });
    CHECK_EQ(sorted, in_order);
  }
}

TEST(loopback_duplicates_land_again_with_their_payload) {
  Options options;
  options.duplicate_one_in = 1;
  options.duplicate_delay = {.least = 100, .most = 100};
  options.completion_delay = {.least = 200, .most = 200};
  Small small(options);
  CHECK(small.world.post(0, 1, 0, 100));
  CHECK_EQ(small.arrivals(1), 1);
  std::fill_n(small.target_of(0), 100, contract::kUntouched);
  small.network->advance(100);
  CHECK(!small.landed(0));
  CHECK_EQ(small.arrivals(1), 1);
  CHECK(small.landed(0));
  small.network->advance(100);
  CHECK_EQ(small.completions(0), 1);
  CHECK_EQ(small.network->counters().duplicates_landed, 1);
}

TEST(loopback_nothing_lands_again_after_the_completion) {
  for (const bool polled : {true, false}) {
    Options options;
    options.duplicate_one_in = 1;
    options.duplicate_delay = {.least = 100, .most = 100};
    options.lands_without_poll = !polled;
    Small small(options);
    CHECK(small.world.post(0, 1, 0, 100));
    CHECK_EQ(small.arrivals(1), 1);
    CHECK_EQ(small.completions(0), 1);
    std::fill_n(small.target_of(0), 100, contract::kUntouched);
    small.network->advance(1000);
    CHECK_EQ(small.arrivals(1), 0);
    CHECK(small.target_of(0)[0] == contract::kUntouched);
    CHECK_EQ(small.network->counters().duplicates_landed, 0);
  }
}

// A duplicate that landed without a poll is reported before its write is complete.
TEST(loopback_a_completion_waits_for_a_duplicate_that_is_not_reported) {
  Options options;
  options.duplicate_one_in = 1;
  options.lands_without_poll = true;
  options.completion_delay = {.least = 10, .most = 10};
  Small small(options);
  CHECK(small.world.post(0, 1, 0, 100));
  small.network->advance(20);
  CHECK(small.landed(0));
  CHECK_EQ(small.completions(0), 0);
  CHECK_EQ(small.arrivals(1), 2);
  CHECK_EQ(small.completions(0), 1);
}

// A sanitizer sees a race between readers of what has landed and a duplicate that changes nothing
// only if the duplicate writes.
TEST(loopback_a_duplicate_writes_only_bytes_that_differ) {
  Options options;
  options.duplicate_one_in = 1;
  options.duplicate_delay = {.least = 100, .most = 100};
  options.completion_delay = {.least = 200, .most = 200};
  Small small(options);
  CHECK(small.world.post(0, 1, 0, 4096));
  CHECK_EQ(small.arrivals(1), 1);
  small.network->advance(100);
  bool landed = false;
  std::thread reader([&] { landed = small.landed(0); });
  const int64_t again = small.arrivals(1);
  reader.join();
  CHECK(landed);
  CHECK_EQ(again, 1);
}

TEST(loopback_events_are_reported_in_the_order_of_time) {
  for (const int32_t first : {0, 1}) {
    Options options;
    options.rails = 2;
    Small small(options);
    CHECK(small.world.post(0, 1, first, 8));
    small.network->advance(10);
    CHECK(small.world.post(0, 1, 1 - first, 8));
    CHECK(small.world.post(1, 0, 0, 8));
    small.network->advance(10);
    CHECK_EQ(small.poll(1, 1).at(0).rail, first);  // the rest waits
    CHECK_EQ(small.arrivals(0), 1);
    small.network->advance(10);
    CHECK(small.world.post(0, 1, 0, 8));
    const std::vector<Event> events = small.poll(1);
    CHECK_EQ(events.size(), 3u);
    CHECK(events[0].kind == EventKind::kArrival);
    CHECK(events[1].kind == EventKind::kCompletion);
    CHECK(events[2].kind == EventKind::kArrival);
  }
}

TEST(loopback_stalls_of_a_rank_and_of_a_rail) {
  Options options;
  options.rails = 2;
  Small small(options, 3);
  const auto post_everywhere = [&] {
    for (const int32_t rail : {0, 1}) {
      CHECK(small.world.post(0, 1, rail, 10));
      CHECK(small.world.post(0, 2, rail, 10));
    }
  };
  small.network->stall(1, 100);
  post_everywhere();
  CHECK_EQ(small.arrivals(1), 0);
  CHECK_EQ(small.arrivals(2), 2);
  small.network->advance(99);
  CHECK_EQ(small.arrivals(1), 0);
  small.network->advance(1);
  CHECK_EQ(small.arrivals(1), 2);
  small.network->stall_rail(1, 1, 100);
  post_everywhere();
  const std::vector<Event> events = small.poll(1);
  CHECK_EQ(events.size(), 1u);
  CHECK_EQ(events[0].rail, 0);
  small.network->advance(100);
  CHECK_EQ(small.arrivals(1), 1);
  CHECK_THROWS(small.network->stall_rail(1, 2, 100), BadArgument);
}

TEST(loopback_writes_stall_their_target_by_option) {
  Options options;
  options.stall_one_in = 1;
  options.stall = {.least = 100, .most = 100};
  Small small(options);
  CHECK(small.world.post(0, 1, 0, 10));
  CHECK_EQ(small.arrivals(1), 0);
  small.network->advance(100);
  CHECK_EQ(small.arrivals(1), 1);
  CHECK_EQ(small.network->counters().stalls, 1);
}

TEST(loopback_refuses_writes_that_have_room_by_option) {
  Options options;
  options.again_one_in = 4;
  Small small(options);
  int refused = 0;
  for (int i = 0; i < 100; ++i) refused += small.world.post(0, 1, 0, 10) ? 0 : 1;
  CHECK(refused > 10 && refused < 45);
  CHECK_EQ(small.network->counters().again, refused);
  CHECK_EQ(small.arrivals(1), 64);
}

// --- Landing and completion -------------------------------------------------------------------

TEST(loopback_nothing_lands_without_the_targets_poll) {
  for (const bool without : {false, true}) {
    Options options;
    options.lands_without_poll = without;
    Small small(options);
    CHECK(small.world.post(0, 1, 0, 100));
    small.network->advance(1000);
    CHECK_EQ(small.completions(0), without ? 1 : 0);
    CHECK_EQ(small.landed(0), without);
    CHECK_EQ(small.arrivals(1), 1);
    CHECK(small.landed(0));
  }
}

TEST(loopback_a_stall_delays_a_landing_without_poll) {
  Options options;
  options.lands_without_poll = true;
  Small small(options);
  small.network->stall(1, 100);
  CHECK(small.world.post(0, 1, 0, 100));
  small.network->advance(99);
  CHECK(!small.landed(0));
  small.network->advance(1);
  CHECK(small.landed(0));
}

TEST(loopback_completions_come_before_or_after_the_landing_by_option) {
  for (const Completions when : {Completions::kBeforeLanding, Completions::kAfterLanding}) {
    const bool before = when == Completions::kBeforeLanding;
    Options options;
    options.completions = when;
    options.delay = {.least = 100, .most = 100};
    Small small(options);
    CHECK(small.world.post(0, 1, 0, 100));
    CHECK_EQ(small.completions(0), before ? 1 : 0);
    std::fill_n(&small.world.sources[0][index(small.world.posted[0].source_offset)],
                before ? 100 : 0, contract::kPoison);
    small.network->advance(100);
    CHECK_EQ(small.arrivals(1), 1);
    CHECK(small.landed(0));
    CHECK_EQ(small.completions(0), before ? 0 : 1);
  }
}

// A source must not change before the completion: who changes it early is found out.
TEST(loopback_sources_are_read_early_or_late_by_option) {
  for (const SourceRead when : {SourceRead::kAtWrite, SourceRead::kLate}) {
    for (const Completions completions :
         {Completions::kBeforeLanding, Completions::kAfterLanding}) {
      Options options;
      options.source_read = when;
      options.completions = completions;
      options.delay = {.least = 100, .most = 100};
      Small small(options);
      CHECK(small.world.post(0, 1, 0, 100));
      std::fill_n(&small.world.sources[0][index(small.world.posted[0].source_offset)], 100,
                  contract::kPoison);
      small.poll(0);  // reports the early completion
      small.network->advance(100);
      CHECK_EQ(small.arrivals(1), 1);
      CHECK_EQ(small.landed(0), when == SourceRead::kAtWrite);
      CHECK_EQ(small.target_of(0)[50] == contract::kPoison, when == SourceRead::kLate);
    }
  }
}

TEST(loopback_large_writes_land_in_pieces_before_their_immediate) {
  Options options;
  options.piece_bytes = 1000;
  options.delay = {.least = 1000, .most = 1000};
  Small small(options);
  CHECK(small.world.post(0, 1, 0, 20'500));
  const auto pieces = [&] {
    int64_t landed = 0;
    for (int64_t piece = 0; piece < 21; ++piece) {
      landed += small.target_of(0)[piece * 1000] == contract::payload(0, piece * 1000) ? 1 : 0;
    }
    return landed;
  };
  small.network->advance(500);
  CHECK_EQ(small.poll(1, 0).size(), 0u);  // pieces are no events
  CHECK(pieces() > 3 && pieces() < 18);
  small.network->advance(499);
  CHECK_EQ(small.arrivals(1), 0);
  small.network->advance(1);
  CHECK_EQ(small.arrivals(1), 1);
  CHECK(small.landed(0));
  CHECK_EQ(small.network->counters().pieces_landed, 21);
  CHECK(small.world.post(0, 1, 0, 1000));
  small.network->advance(1000);
  CHECK_EQ(small.arrivals(1), 1);
  CHECK_EQ(small.network->counters().pieces_landed, 21);
}

TEST(loopback_a_full_receive_queue_stalls_senders) {
  Options options;
  options.receive_queue = 4;
  options.completions = Completions::kBeforeLanding;
  Small small(options);
  for (int i = 0; i < 10; ++i) CHECK(small.world.post(0, 1, 0, 10));
  CHECK_EQ(small.completions(0), 4);
  small.network->advance(1'000'000);
  CHECK_EQ(small.completions(0), 0);
  CHECK_EQ(small.network->counters().waited_for_queue, 6);
  CHECK_EQ(small.poll(1, 3).size(), 3u);
  CHECK_EQ(small.completions(0), 3);
  CHECK_EQ(small.arrivals(1), 7);
  CHECK_EQ(small.completions(0), 3);
}

TEST(loopback_a_full_receive_queue_fails_the_peer) {
  Options options;
  options.receive_queue = 4;
  options.overflow = Overflow::kFailsPeer;
  Small small(options, 3);
  for (int i = 0; i < 4; ++i) CHECK(small.world.post(0, 1, 0, 10));
  CHECK_EQ(small.poll(0).size(), 0u);
  CHECK(small.world.post(0, 1, 0, 10));
  const std::vector<Event> events = small.poll(0);
  CHECK_EQ(events.size(), 1u);
  CHECK(events[0].kind == EventKind::kPeerFailed);
  CHECK_EQ(events[0].peer, 1);
  CHECK_EQ(small.transport(0).error(), "peer 1 is lost: its receive queue of 4 writes overflowed");
  CHECK_EQ(small.arrivals(1), 4);
  CHECK(small.world.post(0, 2, 0, 10));
}

TEST(loopback_arrivals_name_their_peer_by_option) {
  for (const bool named : {false, true}) {
    Options options;
    options.arrivals_name_peer = named;
    Small small(options, 3);
    CHECK(small.world.post(2, 1, 0, 10));
    const std::vector<Event> events = small.poll(1);
    CHECK_EQ(events.size(), 1u);
    CHECK_EQ(events[0].peer, named ? 2 : -1);
  }
}

TEST(loopback_says_that_it_registers_no_gpu_memory) {
  contract::Ranks ranks = ideal(1, 1);
  Transport& transport = *ranks[0];
  CHECK_EQ(transport.why_no_gpu_memory(), "it moves bytes by the CPU");
  std::byte byte{};
  CHECK_EQ(transport.register_gpu_memory({.data = &byte, .bytes = 1, .device = 0}).index, -1);
}
