// Ranks in different calls: distinguishes waits that can never end from long ones.
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

// The published waits and the signals of all ranks: `signals[r]` are those of rank r, 8 bytes each.
struct PublishedWaits {
  explicit PublishedWaits(int32_t ranks)
      : waits(static_cast<size_t>(ranks)),
        signals(static_cast<size_t>(ranks), std::vector<Signal>(static_cast<size_t>(ranks))) {}

  // `rank` waits for the signal that `peer` pushes in its own call `call`.
  void wait(int32_t rank, Phase phase, uint32_t call, int32_t peer) {
    publish(waits[static_cast<size_t>(rank)], AwaitedSignal{.peer = peer,
                                                            .phase = phase,
                                                            .call = call,
                                                            .epoch = call,
                                                            .offset = int64_t{8} * peer,
                                                            .alternative = int64_t{8} * peer});
  }
  std::vector<BlockedRank> deadlock_of(int32_t rank) const {
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
  PublishedWaits published(4);
  published.wait(0, kDispatch, 2, 1);
  CHECK(published.deadlock_of(0).empty());  // rank 1 may only be late
  published.wait(1, kCombine, 1, 2);
  CHECK(published.deadlock_of(0).empty());
  CHECK(published.deadlock_of(1).empty());
  published.wait(2, kDispatch, 2, 1);
  const std::vector<BlockedRank> chain =
      published.deadlock_of(0);  // not in the cycle, but waits for it
  CHECK_EQ(chain.size(), 3u);
  CHECK_EQ(chain[1].rank, 1);
  CHECK_EQ(static_cast<int32_t>(chain[1].phase), static_cast<int32_t>(kCombine));
  CHECK_EQ(chain[1].call, 1u);
  CHECK_EQ(published.deadlock_of(1).size(), 2u);
  CHECK_EQ(published.deadlock_of(2).size(), 2u);
  CHECK(published.deadlock_of(3).empty());  // does not wait
  withdraw(published.waits[2]);
  CHECK(published.deadlock_of(0).empty());
}

TEST(a_wait_whose_signal_has_come_is_no_deadlock) {
  PublishedWaits published(2);
  published.wait(0, kDispatch, 2, 1);
  published.wait(1, kCombine, 1, 0);
  CHECK_EQ(published.deadlock_of(0).size(), 2u);
  published.signals[1][0] = Signal{1, 0};  // rank 1 has not polled it yet
  CHECK(published.deadlock_of(0).empty());
  CHECK(published.deadlock_of(1).empty());
}

namespace {

// Runs `body` on each rank. It must throw the error that names both calls, long before the timeout,
// and the object must refuse further calls.
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

TEST(low_latency_a_rank_that_skips_a_combine_is_reported) {
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

TEST(low_latency_a_rank_that_repeats_a_dispatch_is_reported) {
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

// Sends do not wait. Only a rank that waits in a call that the other never reaches throws the
// error.
TEST(low_latency_different_calls_in_hooks_are_reported) {
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

TEST(a_barrier_beside_a_call_is_reported) {
  const World world = world_for(small_options(2, 0).geometry);
  const Call call(1, small_options(2, 0));
  on_ranks(2, [&](int32_t rank) {
    if (rank == 0) CHECK_THROWS(world.memory[0]->barrier(), BadArgument);
    if (rank == 1) CHECK_THROWS(dispatch(world[1], call, 1), BadArgument);
  });
}

// Two batches overlap in orders that differ between the ranks but satisfy every wait, and ranks are
// late: no rank throws an error.
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
      // The second dispatch is sent before or after the first combine.
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

TimeoutReport timeout_after(uint32_t calls, const CallOptions& options, bool in_combine) {
  const World world(SymmetricMemory::in_process(options_for(2, bytes_for(options.geometry), 0.3)));
  const Call call(1, options);
  TimeoutReport report{};
  on_ranks(2, [&](int32_t rank) {
    LowLatency& mode = world[rank];
    for (uint32_t i = 0; i < calls; ++i) combine(mode, call, rank, dispatch(mode, call, rank));
    if (rank == 1 && !in_combine) return;
    try {
      const Arrived arrived = dispatch(mode, call, rank);
      if (rank == 1) return;
      combine(mode, call, rank, arrived);
    } catch (const PeerTimeout& timeout) {
      report = timeout.report;
    }
  });
  return report;
}

}  // namespace

// Two calls of a kind have their own words. The last call that has arrived may be in the other
// word.
TEST(low_latency_timeouts_name_the_last_call_that_came) {
  for (const uint64_t number : {uint64_t{0}, uint64_t{1}}) {
    for (const bool in_combine : {false, true}) {
      for (const uint32_t calls : {0u, 1u, 2u, 4u, 5u}) {
        const TimeoutReport report = timeout_after(calls, small_options(2, number), in_combine);
        CHECK_EQ(report.phase, in_combine ? "low_latency combine" : "low_latency dispatch");
        CHECK_EQ(report.expected, int64_t{calls} + 1);
        CHECK_EQ(report.actual, int64_t{calls});
      }
    }
  }
}
