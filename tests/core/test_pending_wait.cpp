// Ranks in different calls: which waits can never end, and which are only long.
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "host/low_latency.h"
#include "low_latency_call.hpp"
#include "low_latency_world.hpp"
#include "memory/pending_wait.h"
#include "ranks.hpp"

using namespace fanfold;

namespace {

// What ranks show each other: rank r's own signals are `signals[r]`, at 8 bytes each.
struct Shown {
  explicit Shown(int32_t ranks)
      : waits(static_cast<size_t>(ranks)),
        signals(static_cast<size_t>(ranks), std::vector<Signal>(static_cast<size_t>(ranks))) {}

  // `rank` waits for the signal that `peer` pushes in its own call `call`.
  void wait(int32_t rank, Phase phase, uint32_t call, int32_t peer) {
    publish(waits[static_cast<size_t>(rank)], Awaited{.peer = peer,
                                                      .phase = phase,
                                                      .call = call,
                                                      .epoch = call,
                                                      .offset = int64_t{8} * peer,
                                                      .other = int64_t{8} * peer});
  }
  std::vector<Blocked> deadlock_of(int32_t rank) const {
    const PendingView view{
        static_cast<int32_t>(waits.size()),
        [this](int32_t peer) -> const PendingWait& { return waits[static_cast<size_t>(peer)]; },
        [this](int32_t peer, int64_t offset) {
          return signals[static_cast<size_t>(peer)][static_cast<size_t>(offset / 8)];
        }};
    return find_deadlock(view, rank);
  }

  std::vector<PendingWait> waits;
  std::vector<std::vector<Signal>> signals;
};

constexpr Phase kDispatch = Phase::kLowLatencyDispatch;
constexpr Phase kCombine = Phase::kLowLatencyCombine;

}  // namespace

TEST(waits_in_a_circle_never_end) {
  Shown shown(4);
  shown.wait(0, kDispatch, 2, 1);
  CHECK(shown.deadlock_of(0).empty());  // rank 1 is only late
  shown.wait(1, kCombine, 1, 2);
  CHECK(shown.deadlock_of(0).empty());
  CHECK(shown.deadlock_of(1).empty());
  shown.wait(2, kDispatch, 2, 1);
  const std::vector<Blocked> chain = shown.deadlock_of(0);  // not of the circle, but behind it
  CHECK_EQ(chain.size(), 3u);
  CHECK_EQ(chain[1].rank, 1);
  CHECK_EQ(static_cast<int32_t>(chain[1].phase), static_cast<int32_t>(kCombine));
  CHECK_EQ(chain[1].call, 1u);
  CHECK_EQ(shown.deadlock_of(1).size(), 2u);
  CHECK_EQ(shown.deadlock_of(2).size(), 2u);
  CHECK(shown.deadlock_of(3).empty());  // waits for nobody
  withdraw(shown.waits[2]);
  CHECK(shown.deadlock_of(0).empty());
}

TEST(a_wait_whose_signal_has_come_is_no_deadlock) {
  Shown shown(2);
  shown.wait(0, kDispatch, 2, 1);
  shown.wait(1, kCombine, 1, 0);
  CHECK_EQ(shown.deadlock_of(0).size(), 2u);
  shown.signals[1][0] = Signal{1, 0};  // rank 1 has not looked yet
  CHECK(shown.deadlock_of(0).empty());
  CHECK(shown.deadlock_of(1).empty());
}

namespace {

// Runs `body` on each rank, which must end in the disagreement that names both calls, and leave the
// object failed. The bound on waits is far away.
void expect_different_calls(int32_t ranks, const CallOptions& options,
                            const std::function<void(LowLatency&, const Call&, int32_t)>& body,
                            const std::vector<std::string>& own_call) {
  const World world = world_for(options.geometry);
  const Call call(1, options);
  on_ranks(ranks, [&](int32_t rank) {
    std::string value;
    try {
      body(world[rank], call, rank);
    } catch (const BadArgument& error) {
      CHECK_EQ(error.argument, "call");
      value = error.value;
    }
    const std::string& ours = own_call[static_cast<size_t>(rank)];
    CHECK(value.starts_with(ours + " on rank " + std::to_string(rank) + " and "));
    CHECK(value.find(ours, 1) == std::string::npos);
    CHECK_THROWS(send(world[rank], call, rank), Misuse);
  });
}

void combine(LowLatency& mode, const Call& call, int32_t rank, const Arrived& arrived) {
  const std::vector<bool> none_absent(static_cast<size_t>(call.geometry().ranks), false);
  collect(mode, call, rank, answer(mode, call, rank, arrived, none_absent));
}

Arrived dispatch(LowLatency& mode, const Call& call, int32_t rank) {
  return receive(mode, call, send(mode, call, rank));
}

}  // namespace

TEST(low_latency_a_rank_that_skips_a_combine_is_told) {
  for (const uint64_t number : {uint64_t{0}, uint64_t{1}}) {  // early and late weights
    expect_different_calls(
        3, small_options(3, number),
        [](LowLatency& mode, const Call& call, int32_t rank) {
          const Arrived arrived = dispatch(mode, call, rank);
          if (rank != 2) combine(mode, call, rank, arrived);
          dispatch(mode, call, rank);
        },
        {"low_latency combine 1", "low_latency combine 1", "low_latency dispatch 2"});
  }
}

TEST(low_latency_a_rank_that_repeats_a_dispatch_is_told) {
  expect_different_calls(2, small_options(2, 0),
                         [](LowLatency& mode, const Call& call, int32_t rank) {
                           for (int i = 0; i < 5; ++i) {
                             combine(mode, call, rank, dispatch(mode, call, rank));
                           }
                           const Arrived arrived = dispatch(mode, call, rank);
                           if (rank == 0) dispatch(mode, call, rank);
                           combine(mode, call, rank, arrived);
                         },
                         {"low_latency dispatch 7", "low_latency combine 6"});
}

// Sends go out at once; only who waits in a call that the other can never reach is told.
TEST(low_latency_different_calls_in_hooks_are_told) {
  expect_different_calls(2, small_options(2, 0),
                         [](LowLatency& mode, const Call& call, int32_t rank) {
                           const Arrived arrived = dispatch(mode, call, rank);
                           if (rank == 0) receive(mode, call, send(mode, call, rank));
                           const uint32_t open =
                               rank == 1 ? answer(mode, call, rank, arrived, {false, false}) : 0;
                           if (rank == 1) collect(mode, call, rank, open);
                         },
                         {"low_latency dispatch 2", "low_latency combine 1"});
}

TEST(a_barrier_beside_a_call_is_told) {
  const World world = world_for(small_options(2, 0).geometry);
  const Call call(1, small_options(2, 0));
  on_ranks(2, [&](int32_t rank) {
    if (rank == 0) CHECK_THROWS(world.memory[0]->barrier(), BadArgument);
    if (rank == 1) CHECK_THROWS(dispatch(world[1], call, 1), BadArgument);
  });
}

// Two batches overlap in orders that differ between the ranks but satisfy every wait, and ranks
// come late: nobody is told anything.
TEST(low_latency_late_ranks_are_in_no_different_call) {
  constexpr int32_t kRanks = 3;
  const CallOptions options = small_options(kRanks, 0);
  const World world = world_for(options.geometry);
  on_ranks(kRanks, [&](int32_t rank) {
    Random random(static_cast<uint64_t>(rank));
    LowLatency& mode = world[rank];
    for (uint64_t round = 0; round < 300 / kRoundsShare; ++round) {
      const Call first(2 * round, options);
      const Call second(2 * round + 1, options);
      const bool naps = random.one_in(20);
      const Arrived arrived = dispatch(mode, first, rank);
      // The second dispatch leaves before or behind the first combine.
      const bool before = random.one_in(2);
      const uint32_t early = before ? send(mode, second, rank) : 0;
      if (naps) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      const uint32_t combined = answer(mode, first, rank, arrived, world.none_absent);
      const uint32_t open = before ? early : send(mode, second, rank);
      stall(random);
      check_result(first, rank, collect(mode, first, rank, combined), world.none_absent);
      check_arrived(second, rank, receive(mode, second, open), world.none_absent);
    }
  });
}

namespace {

TimeoutFacts timeout_after(uint32_t calls, const CallOptions& options, bool in_combine) {
  const World world(SymmetricMemory::in_process(options_for(2, bytes_for(options.geometry), 0.3)));
  const Call call(1, options);
  TimeoutFacts facts{};
  on_ranks(2, [&](int32_t rank) {
    LowLatency& mode = world[rank];
    for (uint32_t i = 0; i < calls; ++i) combine(mode, call, rank, dispatch(mode, call, rank));
    if (rank == 1 && !in_combine) return;
    try {
      const Arrived arrived = dispatch(mode, call, rank);
      if (rank == 1) return;
      combine(mode, call, rank, arrived);
    } catch (const PeerTimeout& timeout) {
      facts = timeout.facts;
    }
  });
  return facts;
}

}  // namespace

// Two calls of a kind have words of their own; the last that has come is not the one of the same
// word.
TEST(low_latency_timeouts_name_the_last_call_that_came) {
  for (const uint64_t number : {uint64_t{0}, uint64_t{1}}) {
    for (const bool in_combine : {false, true}) {
      for (const uint32_t calls : {0u, 1u, 2u, 4u, 5u}) {
        const TimeoutFacts facts = timeout_after(calls, small_options(2, number), in_combine);
        CHECK_EQ(facts.phase, in_combine ? "low_latency combine" : "low_latency dispatch");
        CHECK_EQ(facts.expected, int64_t{calls} + 1);
        CHECK_EQ(facts.actual, int64_t{calls});
      }
    }
  }
}
