// Low latency with faults: ranks refuse their input, are late, or never arrive.
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
#include "ranks.hpp"

using namespace fanfold;

namespace {

// Returns the report of the refusal that `body` must throw.
template <typename Body>
RefusalReport refusal_of(Body body) {
  try {
    body();
  } catch (const PeerRefused& refused) {
    return refused.report;
  }
  check::fail(__FILE__, __LINE__, "nobody refused");
}

template <typename Body>
TimeoutReport timeout_of(Body body) {
  try {
    body();
  } catch (const PeerTimeout& timeout) {
    return timeout.report;
  }
  check::fail(__FILE__, __LINE__, "no wait timed out");
}

std::string reason_of(int32_t rank, uint64_t round) {
  return "rank " + std::to_string(rank) + " in round " + std::to_string(round);
}

// Two ranks begin a call. Rank 1 runs `leaves` and then stops. Rank 0 runs `waits`, which must
// throw a timeout of call 1 that names rank 1.
struct Timeout {
  using Body = std::function<void(LowLatency&, const Call&, int32_t)>;

  void expect(const char* phase, const Body& waits, const Body& leaves) const {
    const World world(
        SymmetricMemory::in_process(options_for(2, bytes_for(options.geometry), kBound)));
    const Call call(1, options);
    TimeoutReport report{};
    on_ranks(2, [&](int32_t rank) {
      if (rank == 1) return leaves(world[rank], call, rank);
      report = timeout_of([&] { waits(world[rank], call, rank); });
    });
    CHECK_EQ(report.rank, 0);
    CHECK_EQ(report.peer, 1);
    CHECK_EQ(report.phase, phase);
    CHECK_EQ(report.expected, 1);
    CHECK_EQ(report.actual, 0);
    CHECK(report.seconds >= kBound);
    CHECK(!report.peer_gone);
    CHECK_THROWS(send(world[0], call, 0), Misuse);
    CHECK_THROWS(world[0].quiesce(), Misuse);
    CHECK_THROWS(world[0].refuse_combine("late"), Misuse);
  }

  static constexpr double kBound = 0.5;
  CallOptions options;
};

void send_only(LowLatency& mode, const Call& call, int32_t rank) { send(mode, call, rank); }

Arrived dispatch(LowLatency& mode, const Call& call, int32_t rank) {
  return receive(mode, call, send(mode, call, rank));
}

}  // namespace

// In each round some ranks refuse: the call is aborted on the others, which get one of the reasons,
// and the next call works.
TEST(low_latency_refusals_abort_one_call) {
  constexpr int32_t kRanks = 4;
  const World world = world_for(largest(kRanks));
  on_ranks(kRanks, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    Random program(5);
    LowLatency& mode = world[rank];
    // Two geometries alternate, so that a rank may refuse in one and go back to the other.
    const CallOptions settings[] = {random_options(program, kRanks),
                                    random_options(program, kRanks)};
    for (uint64_t round = 0; round < 400 / kRoundsShare; ++round) {
      const CallOptions options = settings[program.between(0, 1)];
      const Call call(program.next(), options);
      const bool in_combine = program.one_in(2);
      std::vector<bool> refuses(kRanks);
      for (size_t peer = 0; peer < kRanks; ++peer) refuses[peer] = program.one_in(4);
      refuses[static_cast<size_t>(program.between(0, kRanks - 1))] = true;
      const bool refusing = refuses[static_cast<size_t>(rank)];
      const auto expect_refusal = [&](const RefusalReport& report, const char* phase) {
        CHECK_EQ(report.rank, rank);
        CHECK_EQ(report.phase, phase);
        CHECK(refuses[static_cast<size_t>(report.peer)]);
        CHECK_EQ(report.reason, reason_of(report.peer, round));
      };
      stall(jitter);
      if (!in_combine && refusing) {
        mode.refuse_dispatch(reason_of(rank, round));
        continue;
      }
      Arrived arrived(call);
      const auto dispatch_rows = [&] {
        mode.dispatch_receive(send(mode, call, rank), arrived.view());
      };
      if (!in_combine) {
        expect_refusal(refusal_of(dispatch_rows), "low_latency dispatch");
        CHECK_EQ(arrived.expert_totals[0], 1000);  // an aborted call adds no counts
        continue;
      }
      dispatch_rows();
      check_arrived(call, rank, arrived, world.none_absent);
      stall(jitter);
      if (refusing) {
        mode.refuse_combine(reason_of(rank, round));
        continue;
      }
      const uint32_t combined = answer(mode, call, rank, arrived, world.none_absent);
      expect_refusal(refusal_of([&] { collect(mode, call, rank, combined); }),
                     "low_latency combine");
    }
    run_call(mode, Call(1, random_options(program, kRanks)), rank, world.none_absent, jitter);
  });
}

// The others may finish a combine before they receive the refusal of their dispatch. So the refuser
// must take part in that combine without waiting until they have received it.
TEST(low_latency_refusing_while_others_overlap) {
  constexpr int32_t kRanks = 3;
  for (const uint64_t number :
       {uint64_t{0}, uint64_t{1}}) {  // weights with dispatch, and with combine
    const World world = world_for(small_options(kRanks, number).geometry);
    on_ranks(kRanks, [&](int32_t rank) {
      Random jitter(static_cast<uint64_t>(rank));
      LowLatency& mode = world[rank];
      for (uint64_t round = 0; round < 250 / kRoundsShare; ++round) {
        const bool refuses = round % kRanks == static_cast<uint64_t>(rank);
        const Call call(round, small_options(kRanks, number));
        const Arrived arrived = dispatch(mode, call, rank);
        const uint32_t other = refuses ? 0 : send(mode, call, rank);
        if (refuses) mode.refuse_dispatch("no");
        stall(jitter);
        const uint32_t combined = answer(mode, call, rank, arrived, world.none_absent);
        check_result(call, rank, collect(mode, call, rank, combined), world.none_absent);
        if (!refuses) refusal_of([&] { receive(mode, call, other); });
      }
    });
  }
}

// A rank may refuse the first call of a geometry, and so never know that geometry. Rows that the
// others still write in it must not collide with rows that the refuser sends next.
TEST(low_latency_refusing_a_new_geometry) {
  constexpr int32_t kRanks = 3;
  CallOptions wide{};
  wide.geometry = {kRanks, kRanks, 1, kMostHidden, 9};
  CallOptions narrow{};
  narrow.geometry = {kRanks, 5 * kRanks, 6, 16, 9};
  const World world = world_for(largest(kRanks));
  on_ranks(kRanks, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    LowLatency& mode = world[rank];
    for (uint64_t round = 0; round < 2000 / kRoundsShare; ++round) {
      const Call before(round, wide);
      check_arrived(before, rank, dispatch(mode, before, rank), world.none_absent);
      stall(jitter);
      if (rank == 0) {
        mode.refuse_dispatch("no");
      } else {
        refusal_of([&] { dispatch(mode, Call(round, narrow), rank); });
      }
      const Call after(round + 1, wide);
      check_arrived(after, rank, dispatch(mode, after, rank), world.none_absent);
    }
  });
}

namespace {

// Returns the argument that the ranks disagree about; `body` must throw BadArgument.
template <typename Body>
std::string disagreement_of(Body body) {
  try {
    body();
  } catch (const BadArgument& error) {
    return error.argument;
  }
  check::fail(__FILE__, __LINE__, "the ranks agreed");
}

// Rank 2 makes another call than the others: all ranks throw the same error, and the next call
// works. All ranks have agreed to `before` first, so `usual` may not be a new geometry.
void expect_disagreement(const CallOptions& before, const CallOptions& usual,
                         const CallOptions& odd, const std::string& argument) {
  constexpr int32_t kRanks = 3;
  const World world = world_for(largest(kRanks));
  on_ranks(kRanks, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    LowLatency& mode = world[rank];
    for (uint64_t round = 0; round < 200 / kRoundsShare; ++round) {
      run_call(mode, Call(round, before), rank, world.none_absent, jitter);
      stall(jitter);
      const Call call(round, rank == 2 ? odd : usual);
      const std::string found = disagreement_of([&] { dispatch(mode, call, rank); });
      CHECK(found.starts_with(argument));
    }
    run_call(mode, Call(1, usual), rank, world.none_absent, jitter);
  });
}

}  // namespace

TEST(low_latency_ranks_disagree_about_the_geometry) {
  CallOptions usual{};
  usual.geometry = {3, 6, 2, 64, 9};
  const auto with = [&](auto change) {
    CallOptions odd = usual;
    change(odd.geometry);
    return odd;
  };
  const CallOptions odd[] = {
      with([](auto& g) { g.experts = 9; }), with([](auto& g) { g.top_k = 3; }),
      with([](auto& g) { g.hidden = 128; }), with([](auto& g) { g.max_tokens = 8; })};
  const char* names[] = {"num_experts", "top_k", "hidden", "max_tokens"};
  CallOptions third = usual;
  third.geometry.hidden = 16;
  for (size_t i = 0; i < std::size(odd); ++i) {
    expect_disagreement(usual, usual, odd[i], names[i]);   // new for rank 2 only
    expect_disagreement(odd[i], usual, odd[i], names[i]);  // new for all but rank 2
    expect_disagreement(third, usual, odd[i], names[i]);   // new for all
  }
}

TEST(low_latency_ranks_disagree_about_a_dispatch) {
  const CallOptions usual = small_options(3, 0);
  CallOptions odd = usual;
  odd.encoding = usual.encoding == RowEncoding::kBf16 ? RowEncoding::kFp8 : RowEncoding::kBf16;
  expect_disagreement(usual, usual, odd, "encoding of rows");
  odd = usual;
  odd.weights = usual.weights == Weights::kWithDispatch ? Weights::kNone : Weights::kWithDispatch;
  expect_disagreement(usual, usual, odd, "weights");
}

// One rank has late weights, or weights of the dispatch, and the others have none: no rank waits
// for weights that no rank sends.
TEST(low_latency_ranks_disagree_about_a_combine) {
  constexpr int32_t kRanks = 3;
  CallOptions usual = small_options(kRanks, 0);
  usual.weights = Weights::kNone;
  const World world = world_for(usual.geometry);
  on_ranks(kRanks, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    LowLatency& mode = world[rank];
    for (uint64_t round = 0; round < 200 / kRoundsShare; ++round) {
      const Call call(round, usual);
      CallOptions odd = usual;
      odd.weights = round % 2 == 0 ? Weights::kWithCombine : Weights::kWithDispatch;
      const bool is_odd = round % kRanks == static_cast<uint64_t>(rank);
      const Call mine(round, is_odd ? odd : usual);
      const Arrived arrived = dispatch(mode, call, rank);
      stall(jitter);
      const std::string found = disagreement_of(
          [&] { collect(mode, mine, rank, answer(mode, mine, rank, arrived, world.none_absent)); });
      CHECK(found.starts_with("weights"));
    }
    run_call(mode, Call(1, usual), rank, world.none_absent, jitter);
  });
}

namespace {

// Calls of three ranks; rank 2's odd one has another top-k.
struct Odd {
  static constexpr int32_t kRanks = 3;

  Odd() : world(world_for(largest(kRanks))) {
    usual.geometry = {kRanks, 6, 2, 16, 3};
    usual.weights = Weights::kNone;
  }
  Call first() const { return Call(1, usual); }
  Call second(int32_t rank) const {
    CallOptions options = usual;
    if (rank == kRanks - 1) options.geometry.top_k = 1;
    return Call(2, options);
  }

  World world;
  CallOptions usual{};
};

}  // namespace

// Rank 2, for which the geometry is new, throws the error when it sends. The others throw it when
// they receive, which is after the combine.
TEST(low_latency_disagreeing_under_a_combine) {
  const Odd odd;
  on_ranks(Odd::kRanks, [&](int32_t rank) {
    LowLatency& mode = odd.world[rank];
    const std::vector<bool>& none_absent = odd.world.none_absent;
    const Arrived arrived = dispatch(mode, odd.first(), rank);
    uint32_t open = 0;
    const auto send_second = [&] { open = send(mode, odd.second(rank), rank); };
    if (rank == 2) CHECK_EQ(disagreement_of(send_second), "top_k");
    if (rank != 2) send_second();
    const uint32_t combined = answer(mode, odd.first(), rank, arrived, none_absent);
    check_result(odd.first(), rank, collect(mode, odd.first(), rank, combined), none_absent);
    if (rank == 2) return;
    CHECK_EQ(disagreement_of([&] { receive(mode, odd.second(rank), open); }), "top_k");
  });
}

TEST(low_latency_disagreeing_with_receives_out_of_order) {
  const Odd odd;
  on_ranks(Odd::kRanks, [&](int32_t rank) {
    LowLatency& mode = odd.world[rank];
    dispatch(mode, odd.first(), rank);
    uint32_t open = 0;
    const auto send_second = [&] { open = send(mode, odd.second(rank), rank); };
    if (rank == 2) CHECK_EQ(disagreement_of(send_second), "top_k");
    if (rank != 2) send_second();
    const uint32_t third = send(mode, odd.first(), rank);
    check_arrived(odd.first(), rank, receive(mode, odd.first(), third), odd.world.none_absent);
    if (rank == 2) return;
    CHECK_EQ(disagreement_of([&] { receive(mode, odd.second(rank), open); }), "top_k");
  });
}

// A geometry may not change while a call is in flight. Rank 2 tries to change it; the others get
// its refusal.
TEST(low_latency_misuse_of_one_rank_is_reported) {
  const Odd odd;
  on_ranks(Odd::kRanks, [&](int32_t rank) {
    LowLatency& mode = odd.world[rank];
    dispatch(mode, odd.first(), rank);
    const uint32_t open = send(mode, odd.first(), rank);
    uint32_t second = 0;
    const auto send_second = [&] { second = send(mode, odd.second(rank), rank); };
    if (rank == 2) CHECK_THROWS(send_second(), Misuse);
    if (rank != 2) send_second();
    check_arrived(odd.first(), rank, receive(mode, odd.first(), open), odd.world.none_absent);
    if (rank != 2) {
      CHECK_EQ(refusal_of([&] { receive(mode, odd.second(rank), second); }).peer, 2);
    }
    Random jitter(1);
    run_call(mode, odd.first(), rank, odd.world.none_absent, jitter);
  });
}

// A masked rank may come back and write by the old geometry, so the geometry cannot change.
TEST(low_latency_keeps_its_geometry_while_a_rank_is_masked) {
  const Odd odd;
  on_ranks(2,
           [&](int32_t rank) { odd.world.memory[static_cast<size_t>(rank)]->set_masked(2, true); });
  const std::vector<bool> absent{false, false, true};
  CallOptions other = odd.usual;
  other.geometry.hidden = 32;
  on_ranks(2, [&](int32_t rank) {
    LowLatency& mode = odd.world[rank];
    Random jitter(1);
    run_call(mode, odd.first(), rank, absent, jitter);
    // Both refuse, which ends the call on both.
    CHECK_THROWS(send(mode, Call(1, other), rank), Misuse);
    run_call(mode, odd.first(), rank, absent, jitter);
  });
}

// A word that no call has used for 2^31 calls must not count as arrived.
TEST(low_latency_old_late_routing_has_not_arrived) {
  const CallOptions late = small_options(2, 1);
  constexpr uint32_t kFar = 0x80000001u;
  World world = world_for(late.geometry, kFar);
  using Kind = LowLatencySignals::Kind;
  for (const auto& own : world.memory) {
    for (int32_t parity = 0; parity < kParities; ++parity) {
      for (int32_t peer = 0; peer < 2; ++peer) {
        const LowLatencySignals signals{2};
        own->peer(own->rank())
            .signal_quietly(signals.offset(Kind::kLateRouting, parity, peer), Signal{0, 1});
      }
    }
  }
  on_ranks(2, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    for (uint64_t round = 0; round < 200 / kRoundsShare; ++round) {
      run_call(world[rank], Call(round, late), rank, world.none_absent, jitter);
    }
  });
}

TEST(low_latency_a_rank_that_masks_itself_keeps_its_own_signature) {
  const Odd odd;
  odd.world.memory[0]->set_masked(0, true);
  on_ranks(Odd::kRanks, [&](int32_t rank) { dispatch(odd.world[rank], odd.first(), rank); });
}

// Dispatch and combine write their weights to the same memory.
TEST(low_latency_weights_of_both_kinds_alternate) {
  CallOptions early = small_options(2, 0);
  early.weights = Weights::kWithDispatch;
  CallOptions late = early;
  late.weights = Weights::kWithCombine;
  const World world = world_for(early.geometry);
  on_ranks(2, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    LowLatency& mode = world[rank];
    for (uint64_t round = 0; round < 300 / kRoundsShare; ++round) {
      run_call(mode, Call(round, round % 2 == 0 ? early : late), rank, world.none_absent, jitter);
    }
    const Call first(1, late);
    const Arrived arrived = dispatch(mode, first, rank);
    const Call second(2, early);
    const uint32_t open = send(mode, second, rank);
    CHECK_THROWS(answer(mode, first, rank, arrived, world.none_absent), Misuse);
    check_arrived(second, rank, receive(mode, second, open), world.none_absent);
    const uint32_t combined = answer(mode, first, rank, arrived, world.none_absent);
    check_result(first, rank, collect(mode, first, rank, combined), world.none_absent);
  });
}

// A refusal does not release the rows of the call before it.
TEST(low_latency_refusing_keeps_older_rows) {
  const World world = world_for(small_options(2, 0).geometry);
  const auto call_of = [](uint64_t number) { return Call(number + 80, small_options(2, 0)); };
  on_ranks(2, [&](int32_t rank) {
    LowLatency& mode = world[rank];
    const uint32_t first = send(mode, call_of(1), rank);
    if (rank == 0) {
      const uint32_t second = send(mode, call_of(2), rank);
      receive(mode, call_of(1), first);
      CHECK_EQ(refusal_of([&] { receive(mode, call_of(2), second); }).peer, 1);
      receive(mode, call_of(3), send(mode, call_of(3), rank));
      return;
    }
    mode.refuse_dispatch("no");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    check_arrived(call_of(1), rank, receive(mode, call_of(1), first), world.none_absent);
    receive(mode, call_of(3), send(mode, call_of(3), rank));
  });
}

TEST(low_latency_timeouts_of_dispatch) {
  const Timeout timeout{small_options(2, 0)};
  timeout.expect("low_latency dispatch", dispatch, [](auto&, auto&, int32_t) {});
  // The third dispatch needs the slots of the first one, and quiesce() needs all slots.
  const auto send_twice = [](LowLatency& mode, const Call& call, int32_t rank) {
    send(mode, call, rank);
    send(mode, call, rank);
  };
  const auto send_a_third = [](LowLatency& mode, const Call& call, int32_t rank) {
    const uint32_t sent[] = {send(mode, call, rank), send(mode, call, rank)};
    for (const uint32_t epoch : sent) receive(mode, call, epoch);
    send(mode, call, rank);
  };
  timeout.expect("low_latency dispatch (acknowledgements of earlier calls)", send_a_third,
                 send_twice);
  const auto dispatch_and_rest = [](LowLatency& mode, const Call& call, int32_t rank) {
    dispatch(mode, call, rank);
    mode.quiesce();
  };
  timeout.expect("low_latency dispatch (acknowledgements of earlier calls)", dispatch_and_rest,
                 send_only);
}

TEST(low_latency_timeouts_of_combine) {
  const std::vector<bool> none_absent(2, false);
  const auto combine = [&](LowLatency& mode, const Call& call, int32_t rank) {
    const Arrived arrived = dispatch(mode, call, rank);
    collect(mode, call, rank, answer(mode, call, rank, arrived, none_absent));
  };
  const Timeout early{small_options(2, 0)};
  early.expect("low_latency combine", combine, dispatch);
  const Timeout late{small_options(2, 1)};
  const auto answer_only = [&](LowLatency& mode, const Call& call, int32_t rank) {
    answer(mode, call, rank, dispatch(mode, call, rank), none_absent);
  };
  late.expect("low_latency combine", answer_only, dispatch);
  const auto answer_twice = [&](LowLatency& mode, const Call& call, int32_t rank) {
    const Arrived arrived = dispatch(mode, call, rank);
    for (int i = 0; i < 2; ++i) answer(mode, call, rank, arrived, none_absent);
  };
  const auto answer_a_third = [&](LowLatency& mode, const Call& call, int32_t rank) {
    const Arrived arrived = dispatch(mode, call, rank);
    for (int i = 0; i < 2; ++i) {
      collect(mode, call, rank, answer(mode, call, rank, arrived, none_absent));
    }
    answer(mode, call, rank, arrived, none_absent);
  };
  early.expect("low_latency combine (acknowledgements of earlier calls)", answer_a_third,
               answer_twice);
}

// Rank 2 never arrives: the others go on without its experts, call after call.
TEST(low_latency_goes_on_without_late_peers) {
  constexpr int32_t kRanks = 3;
  SymmetricOptions options = options_for(kRanks, bytes_for(largest(kRanks)), 1.0);
  options.mask_late_peers = true;
  const World world(SymmetricMemory::in_process(options));
  const std::vector<bool> absent{false, false, true};
  on_ranks(2, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    Random program(17);
    for (int round = 0; round < 60 / kRoundsShare; ++round) {
      CallOptions call_options = random_options(program, kRanks);
      call_options.geometry = {kRanks, 4 * kRanks, 3, 144, 9};  // may not change
      run_call(world[rank], Call(program.next(), call_options), rank, absent, jitter);
    }
  });
  CHECK(world.memory[0]->masked(2));
  CHECK(world.memory[1]->masked(2));
  CHECK(!world.memory[0]->masked(1));
  CHECK(!world.memory[1]->masked(0));
}
