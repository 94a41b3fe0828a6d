// The low-latency protocol with threads as ranks: compares every row and every sum with
// low_latency_call.hpp, while ranks run ahead of each other.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "host/low_latency.h"
#include "low_latency_call.hpp"
#include "low_latency_world.hpp"
#include "ranks.hpp"

using namespace fanfold;

TEST(low_latency_any_geometry_and_routing) {
  for (int32_t ranks = 1; ranks <= 5; ++ranks) {
    const World world = world_for(largest(ranks));
    on_ranks(ranks, [&](int32_t rank) {
      Random jitter(static_cast<uint64_t>(rank));
      Random program(static_cast<uint64_t>(ranks) * 1000);
      for (int round = 0; round < 120 / kRoundsShare; ++round) {
        const CallOptions options = random_options(program, ranks);
        const Call call(program.next(), options);
        run_call(world[rank], call, rank, world.none_absent, jitter);
      }
    });
  }
}

TEST(low_latency_over_mappings_of_their_own) {
  constexpr int32_t kRanks = 3;
  const World world(mapped_group(options_for(kRanks, bytes_for(largest(kRanks)))));
  on_ranks(kRanks, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    Random program(99);
    for (int round = 0; round < 60 / kRoundsShare; ++round) {
      const CallOptions options = random_options(program, kRanks);
      run_call(world[rank], Call(program.next(), options), rank, world.none_absent, jitter);
    }
  });
}

// 512 experts, top-22, a hidden size with an incomplete block.
TEST(low_latency_of_many_experts) {
  const LowLatencyGeometry geometry{4, 512, 22, 144, 5};
  const World world = world_for(geometry);
  on_ranks(geometry.ranks, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    for (uint64_t seed = 0; seed < 4; ++seed) {
      CallOptions options{};
      options.geometry = geometry;
      options.encoding = seed % 2 == 0 ? RowEncoding::kBf16 : RowEncoding::kFp8;
      run_call(world[rank], Call(seed, options), rank, world.none_absent, jitter);
    }
  });
}

// Reuses the same few slots through the wrap of the epochs, while ranks run ahead.
TEST(low_latency_slots_are_reused_safely) {
  for (const int32_t ranks : {2, 3}) {
    const uint64_t rounds = 3000 / kRoundsShare;
    const auto wraps_halfway = static_cast<uint32_t>(-static_cast<int64_t>(rounds / 2));
    const World world = world_for(small_options(ranks, 0).geometry, wraps_halfway);
    on_ranks(ranks, [&](int32_t rank) {
      Random jitter(static_cast<uint64_t>(rank));
      for (uint64_t round = 0; round < rounds; ++round) {
        const Call call(round, small_options(ranks, round));
        run_call(world[rank], call, rank, world.none_absent, jitter);
      }
    });
  }
}

// Two dispatches, then two combines in flight, received in either order; the core refuses a third.
TEST(low_latency_two_calls_in_flight) {
  constexpr int32_t kRanks = 3;
  const World world = world_for(small_options(kRanks, 0).geometry);
  on_ranks(kRanks, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    LowLatency& mode = world[rank];
    for (uint64_t round = 0; round < 1000 / kRoundsShare; ++round) {
      const Call calls[] = {Call(2 * round, small_options(kRanks, round)),
                            Call(2 * round + 1, small_options(kRanks, round))};
      const size_t first = jitter.one_in(2) ? 0 : 1;  // each rank chooses its own order
      const uint32_t sent[] = {send(mode, calls[0], rank), send(mode, calls[1], rank)};
      CHECK_THROWS(send(mode, calls[0], rank), Misuse);
      CHECK_THROWS(mode.refuse_dispatch("too many"), Misuse);
      std::vector<Arrived> arrived(calls, calls + 2);
      for (const size_t which : {first, 1 - first}) {
        stall(jitter);
        arrived[which] = receive(mode, calls[which], sent[which]);
        check_arrived(calls[which], rank, arrived[which], world.none_absent);
      }
      const uint32_t back[] = {answer(mode, calls[0], rank, arrived[0], world.none_absent),
                               answer(mode, calls[1], rank, arrived[1], world.none_absent)};
      CHECK_THROWS(answer(mode, calls[0], rank, arrived[0], world.none_absent), Misuse);
      for (const size_t which : {1 - first, first}) {
        stall(jitter);
        check_result(calls[which], rank, collect(mode, calls[which], rank, back[which]),
                     world.none_absent);
      }
    }
  });
}

// The next dispatch is sent before the last one is received. A send waits only for the reuse of
// slots.
TEST(low_latency_dispatches_in_a_pipeline) {
  constexpr int32_t kRanks = 3;
  const World world = world_for(small_options(kRanks, 0).geometry);
  on_ranks(kRanks, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    LowLatency& mode = world[rank];
    const auto call_of = [](uint64_t round) { return Call(round, small_options(kRanks, 0)); };
    uint32_t sent = send(mode, call_of(0), rank);
    for (uint64_t round = 0; round < 2000 / kRoundsShare; ++round) {
      const uint32_t next = send(mode, call_of(round + 1), rank);
      stall(jitter);
      const Call call = call_of(round);
      check_arrived(call, rank, receive(mode, call, sent), world.none_absent);
      sent = next;
    }
  });
}

// Overlaps two halves of a batch as decoding does: sends the next dispatch before it receives the
// last combine.
TEST(low_latency_dispatch_and_combine_overlap) {
  constexpr int32_t kRanks = 3;
  const World world = world_for(small_options(kRanks, 0).geometry);
  on_ranks(kRanks, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    LowLatency& mode = world[rank];
    const auto call_of = [&](uint64_t round) { return Call(round, small_options(kRanks, 0)); };
    uint32_t sent = send(mode, call_of(0), rank);
    for (uint64_t round = 0; round < 1000 / kRoundsShare; ++round) {
      const Call call = call_of(round);
      const Arrived arrived = receive(mode, call, sent);
      check_arrived(call, rank, arrived, world.none_absent);
      stall(jitter);
      const uint32_t combined = answer(mode, call, rank, arrived, world.none_absent);
      sent = send(mode, call_of(round + 1), rank);
      stall(jitter);
      check_result(call, rank, collect(mode, call, rank, combined), world.none_absent);
    }
  });
}

// A rank that has received only its second call still needs the rows of its first.
TEST(low_latency_receiving_out_of_order_keeps_older_rows) {
  const World world = world_for(small_options(2, 0).geometry);
  const auto call_of = [](uint64_t number) { return Call(number + 40, small_options(2, 0)); };
  std::atomic<bool> overtaken{false};
  on_ranks(2, [&](int32_t rank) {
    LowLatency& mode = world[rank];
    const uint32_t first = send(mode, call_of(1), rank);
    const uint32_t second = send(mode, call_of(2), rank);
    if (rank == 0) {
      receive(mode, call_of(1), first);
      receive(mode, call_of(2), second);
      const uint32_t third = send(mode, call_of(3), rank);
      overtaken = true;
      receive(mode, call_of(3), third);
      return;
    }
    receive(mode, call_of(2), second);
    // Rank 0 must not send its third dispatch before this rank receives `first`. The sleep gives
    // rank 0 the time to do so wrongly.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    CHECK(!overtaken);
    check_arrived(call_of(1), rank, receive(mode, call_of(1), first), world.none_absent);
    receive(mode, call_of(3), send(mode, call_of(3), rank));
  });
}

TEST(low_latency_misuse_is_refused) {
  World world = world_for(small_options(2, 0).geometry);
  const Call call(3, small_options(2, 0));
  CallOptions other = small_options(2, 0);
  other.geometry.top_k = 1;
  CallOptions huge = small_options(2, 0);
  huge.geometry.max_tokens = 1000;
  on_ranks(2, [&](int32_t rank) {
    LowLatency& mode = world[rank];
    CHECK_THROWS(send(mode, Call(1, huge), rank), BadArgument);
    const uint32_t sent = send(mode, call, rank);
    CHECK_THROWS(receive(mode, call, sent + 1), Misuse);
    CHECK_THROWS(receive(mode, call, sent + kParities), Misuse);
    CHECK_THROWS(receive(mode, call, sent - kParities), Misuse);
    CHECK_THROWS(send(mode, Call(1, other), rank), Misuse);  // a call is in flight
    CHECK_THROWS(mode.quiesce(), Misuse);
    const Arrived arrived = receive(mode, call, sent);
    CHECK_THROWS(receive(mode, call, sent), Misuse);
    const uint32_t combined = answer(mode, call, rank, arrived, world.none_absent);
    CHECK_THROWS(collect(mode, call, rank, combined + 1), Misuse);
    check_result(call, rank, collect(mode, call, rank, combined), world.none_absent);
    CHECK_THROWS(collect(mode, call, rank, combined), Misuse);
    mode.quiesce();
    Random jitter(1);
    run_call(mode, Call(1, other), rank, world.none_absent, jitter);
  });
  world.links.clear();  // nothing may arrive in closed memory
  world.memory[0]->close();
  CHECK_THROWS(send(world[0], call, 0), Misuse);
  CHECK_THROWS(world[0].quiesce(), Misuse);
  CHECK_THROWS(world[0].refuse_dispatch("closed"), Misuse);
}

TEST(low_latency_needs_room_for_its_signals) {
  const Group group = SymmetricMemory::in_process(options_for(2, 4096));
  CHECK_THROWS(LowLatency(*group[0], 0, 4097), BadArgument);
  CHECK_THROWS(LowLatency(*group[0], 4096, 128), BadArgument);
  CHECK_THROWS(LowLatency(*group[0], 0, LowLatencySignals{2}.bytes() - 1), BadArgument);
}

namespace {

// Runs one rank of a random program. All ranks send the same calls in the same order. Each rank
// decides itself when it receives them.
class Runner {
 public:
  Runner(const World& world, int32_t rank)
      : world_(world), mode_(world[rank]), rank_(rank), own_(static_cast<uint64_t>(rank)) {}

  void dispatch(const Call& call) {
    if (sent_.size() == kParities) receive_oldest();
    sent_.push_back({call, send(mode_, call, rank_)});
    receive_some();
  }

  // Answers the oldest call that has not been answered.
  void combine() {
    if (received_.empty()) receive_oldest();
    if (answered_.size() == kParities) collect_oldest();
    auto [call, arrived] = std::move(received_.front());
    received_.erase(received_.begin());
    const uint32_t epoch = answer(mode_, call, rank_, arrived, world_.none_absent);
    answered_.push_back({std::move(call), epoch});
    receive_some();
  }

  void finish() {
    while (!sent_.empty()) receive_oldest();
    while (!answered_.empty()) collect_oldest();
  }

 private:
  struct Pending {
    Call call;
    uint32_t epoch;
  };

  void receive_some() {
    stall(own_);
    if (!sent_.empty() && own_.one_in(3)) receive_oldest();
    if (!answered_.empty() && own_.one_in(3)) collect_oldest();
  }

  void receive_oldest() {
    const Pending pending = std::move(sent_.front());
    sent_.erase(sent_.begin());
    Arrived arrived = receive(mode_, pending.call, pending.epoch);
    check_arrived(pending.call, rank_, arrived, world_.none_absent);
    received_.emplace_back(pending.call, std::move(arrived));
  }

  void collect_oldest() {
    const Pending pending = std::move(answered_.front());
    answered_.erase(answered_.begin());
    check_result(pending.call, rank_, collect(mode_, pending.call, rank_, pending.epoch),
                 world_.none_absent);
  }

  const World& world_;
  LowLatency& mode_;
  int32_t rank_;
  Random own_;
  std::vector<Pending> sent_;
  std::vector<std::pair<Call, Arrived>> received_;
  std::vector<Pending> answered_;
};

}  // namespace

// Dispatches and combines in any order with at most two of a kind in flight, up to three calls
// between their dispatch and their combine, and occasional new geometries.
TEST(low_latency_random_programs) {
  for (int32_t ranks = 2; ranks <= 4; ++ranks) {
    const World world = world_for(largest(ranks));
    on_ranks(ranks, [&](int32_t rank) {
      Random program(static_cast<uint64_t>(ranks));
      for (int epoch = 0; epoch < 20; ++epoch) {
        Runner runner(world, rank);
        const CallOptions options = random_options(program, ranks);
        int32_t open = 0;
        for (int step = 0; step < 60 / kRoundsShare; ++step) {
          if (open == 0 || (open < 3 && program.one_in(2))) {
            runner.dispatch(Call(program.next(), options));
            ++open;
          } else {
            runner.combine();
            --open;
          }
        }
        runner.finish();
      }
    });
  }
}
