// The high-throughput protocol with threads as ranks: compares every row and every sum with
// high_throughput_call.hpp, while ranks run ahead of each other, refuse, are late or never arrive.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "high_throughput_call.hpp"
#include "host/exchange.h"
#include "host/high_throughput.h"
#include "host/reduce.h"
#include "host/routes.h"
#include "host/stream.h"
#include "host/stream_paths.h"
#include "links.hpp"
#include "ranks.hpp"

using namespace fanfold;
using namespace fanfold::high_throughput;

namespace {

constexpr int64_t kStaging = 8 << 10;  // a few records for each of the ranks, so that rings wrap

// All ranks in one process with their high-throughput objects.
struct World {
  explicit World(Group group, uint32_t epoch = 0)
      : memory(std::move(group)), links(separate(memory)) {
    for (const auto& own : memory) {
      modes.push_back(std::make_unique<HighThroughput>(*own, 0, own->bytes(), epoch));
    }
  }
  HighThroughput& operator[](int32_t rank) const { return *modes[at(rank)]; }

  Group memory;
  Links links;
  std::vector<std::unique_ptr<HighThroughput>> modes;
};

SymmetricOptions options_of(int32_t ranks, double timeout_seconds = kLongTimeoutSeconds) {
  SymmetricOptions options =
      options_for(ranks, HighThroughputLayout{ranks}.bytes(kStaging), timeout_seconds);
  options.hosts = hosts_for(ranks, hosts_of_worlds);
  return options;
}

World world_for(int32_t ranks, uint32_t epoch = 0) {
  return World(SymmetricMemory::in_process(options_of(ranks)), epoch);
}

// Yields a random number of times, so that the ranks run in every order.
void stall(Random& random) {
  if (random.one_in(2)) return;
  for (int32_t yields = random.between(0, 100); yields > 0; --yields) std::this_thread::yield();
}

Arrived dispatch(HighThroughput& mode, const Call& call, int32_t rank) {
  Arrived arrived(call, rank);
  HighThroughputPlan plan = arrived.plan();
  const HighThroughputTokens tokens = tokens_of(call, rank);
  mode.exchange_counts(tokens, plan, call.shape().alignment);
  arrived.received = plan.received;
  const HighThroughputReceived room = arrived.allocate();
  mode.dispatch_rows(tokens, arrived.plan(), room);
  return arrived;
}

std::vector<uint16_t> combine(HighThroughput& mode, const Call& call, int32_t rank,
                              Arrived& arrived) {
  const Shape& shape = call.shape();
  const Batch& own = call.batch(rank);
  std::vector<uint16_t> out(own.x.size(), 0xffff);
  std::vector<float> weights(own.topk_idx.size(), -7.0f);
  // Every top-k entry with a row returns the weight 1.
  const HighThroughputPlan plan = arrived.plan();
  const size_t count =
      shape.expert_major ? arrived.row_weights.size() : at(arrived.received * shape.top_k);
  const std::vector<float> ones(count, 1.0f);
  std::vector<uint16_t> y(arrived.rows.size());
  std::transform(arrived.rows.begin(), arrived.rows.end(), y.begin(),
                 [&](uint16_t x) { return Call::answer_of(rank, x); });
  mode.combine(HighThroughputOutputs{.y = y,
                                     .hidden = shape.hidden,
                                     .row_weights = shape.expert_major && shape.weighted
                                                        ? Array<const float>(arrived.row_weights)
                                                        : nullptr,
                                     .topk_weights = ones,
                                     .weighted = shape.returns_weights,
                                     .expert_major = shape.expert_major},
               plan,
               HighThroughputResult{.out = out, .bias = {own.bias, nullptr}, .weights = weights});
  for (size_t entry = 0; shape.returns_weights && entry < weights.size(); ++entry) {
    // Token-major, every rank of the token returns a weight; expert-major, only the rank that has
    // the entry's expert does.
    const size_t token = entry / at(shape.top_k);
    int32_t ranks = 0;
    for (int32_t peer = 0; peer < shape.ranks; ++peer) {
      ranks += plan.is_token_in_rank[token * at(shape.ranks) + at(peer)];
    }
    const int32_t expected = shape.expert_major ? (own.topk_idx[entry] >= 0 ? 1 : 0) : ranks;
    CHECK_EQ(weights[entry], static_cast<float>(expected));
  }
  return out;
}

// Runs and checks a dispatch, its combine, and a cached dispatch with its plan.
void run_call(HighThroughput& mode, const Call& call, int32_t rank, Random& jitter) {
  stall(jitter);
  Arrived arrived = dispatch(mode, call, rank);
  arrived.check_plan(rank);
  arrived.check_rows(rank);
  stall(jitter);
  CHECK_EQ(combine(mode, call, rank, arrived), call.result_of(rank));
  stall(jitter);
  HighThroughputTokens tokens = tokens_of(call, rank);
  tokens.topk_idx = nullptr;
  tokens.topk_weights = nullptr;
  tokens.weighted = false;
  const HighThroughputReceived room = arrived.room();
  mode.dispatch_cached(tokens, arrived.plan(), room);
  arrived.check_rows(rank);
}

}  // namespace

TEST(high_throughput_any_geometry_and_routing) {
  for (int32_t ranks = 1; ranks <= 5; ++ranks) {
    const World world = world_for(ranks);
    on_ranks(ranks, [&](int32_t rank) {
      Random jitter(static_cast<uint64_t>(rank));
      Random program(static_cast<uint64_t>(ranks) * 1000);
      for (int round = 0; round < 120 / kRoundsShare; ++round) {
        const Shape shape = random_shape(program, ranks);
        run_call(world[rank], Call(program.next(), shape), rank, jitter);
      }
    });
  }
}

TEST(high_throughput_over_mappings_of_their_own) {
  constexpr int32_t kRanks = 3;
  const World world(mapped_group(options_of(kRanks)));
  on_ranks(kRanks, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    Random program(99);
    for (int round = 0; round < 60 / kRoundsShare; ++round) {
      const Shape shape = random_shape(program, kRanks);
      run_call(world[rank], Call(program.next(), shape), rank, jitter);
    }
  });
}

// Rows longer than a ring, which are sent in pieces, and many more tokens than a ring holds.
TEST(high_throughput_streams_what_does_not_fit) {
  constexpr int32_t kRanks = 3;
  const World world = world_for(kRanks);
  on_ranks(kRanks, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    for (const bool expert_major : {true, false}) {
      Shape shape{.ranks = kRanks, .experts = 6, .top_k = 3, .hidden = 6000, .most_tokens = 5};
      shape.scale_words = 3;
      shape.returns_weights = true;
      shape.expert_major = expert_major;
      run_call(world[rank], Call(7, shape), rank, jitter);
      shape.hidden = 16;
      shape.most_tokens = 2000 / kRoundsShare;
      run_call(world[rank], Call(8, shape), rank, jitter);
    }
  });
}

// Reuses the same few words through the wrap of the epochs.
TEST(high_throughput_epochs_may_wrap) {
  constexpr int32_t kRanks = 3;
  const uint64_t rounds = 900 / kRoundsShare;
  const World world = world_for(kRanks, static_cast<uint32_t>(-static_cast<int64_t>(rounds)));
  on_ranks(kRanks, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    const Shape shape{.ranks = kRanks, .experts = 6, .top_k = 2, .hidden = 16, .most_tokens = 3};
    for (uint64_t round = 0; round < rounds; ++round) {
      run_call(world[rank], Call(round, shape), rank, jitter);
    }
  });
}

// In each round one rank refuses, at once or after the counts: no rank completes the call, all
// other ranks get the reason, and the next call works.
TEST(high_throughput_refusals_abort_one_call) {
  constexpr int32_t kRanks = 4;
  const World world = world_for(kRanks);
  on_ranks(kRanks, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    Random program(5);
    HighThroughput& mode = world[rank];
    for (int round = 0; round < 300 / kRoundsShare; ++round) {
      const Call call(program.next(), random_shape(program, kRanks));
      const int32_t refuser = program.between(0, kRanks - 1);
      const int32_t moment = program.between(0, 2);
      const std::string reason = "round " + std::to_string(round);
      RefusalReport report{};
      stall(jitter);
      try {
        if (moment == 0 && rank == refuser) {
          mode.refuse_dispatch(reason);
          continue;
        }
        Arrived arrived(call, rank);
        if (moment == 1 && rank == refuser) {
          HighThroughputPlan plan = arrived.plan();
          mode.exchange_counts(tokens_of(call, rank), plan, 1);
          stall(jitter);
          mode.refuse_dispatch(reason);
          continue;
        }
        arrived = dispatch(mode, call, rank);
        if (moment == 2 && rank == refuser) {
          mode.refuse_combine(reason);
          continue;
        }
        combine(mode, call, rank, arrived);
      } catch (const PeerRefused& refused) {
        report = refused.report;
      }
      CHECK_EQ(report.peer, refuser);
      CHECK_EQ(report.rank, rank);
      CHECK_EQ(report.reason, reason);
    }
    run_call(mode, Call(1, random_shape(program, kRanks)), rank, jitter);
  });
}

// One rank has another shape than the rest: all ranks throw an error, and the next call works.
TEST(high_throughput_ranks_must_agree) {
  constexpr int32_t kRanks = 3;
  const World world = world_for(kRanks);
  const Shape common{.ranks = kRanks, .experts = 6, .top_k = 2, .hidden = 32, .most_tokens = 3};
  std::vector<Shape> others(4, common);
  others[0].experts = 12;
  others[1].top_k = 3;
  others[2].hidden = 16;
  others[3].weighted = false;
  on_ranks(kRanks, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    for (const Shape& other : others) {
      const Call call(3, rank == 1 ? other : common);
      bool refused = false;
      try {
        dispatch(world[rank], call, rank);
      } catch (const BadArgument&) {
        refused = true;
      } catch (const PeerRefused&) {
        refused = true;
      }
      CHECK(refused);
      run_call(world[rank], Call(4, common), rank, jitter);
    }
  });
}

// Rank 1 stops in the middle of a call. The others also wait for each other, but their timeouts
// name rank 1 alone.
TEST(high_throughput_timeouts_name_the_one_that_is_late) {
  constexpr int32_t kRanks = 3;
  constexpr double kBound = 1.0;
  Shape shape{.ranks = kRanks, .experts = 6, .top_k = 4, .hidden = 512, .most_tokens = 60};
  for (int32_t moment = 0; moment < 3; ++moment) {
    const World world(SymmetricMemory::in_process(options_of(kRanks, kBound)));
    const Call call(11, shape);
    std::vector<TimeoutReport> reports(kRanks);
    on_ranks(kRanks, [&](int32_t rank) {
      HighThroughput& mode = world[rank];
      Arrived arrived(call, rank);
      if (rank == 1) {
        if (moment == 0) return;
        HighThroughputPlan plan = arrived.plan();
        if (moment == 1) return mode.exchange_counts(tokens_of(call, rank), plan, 1);
        dispatch(mode, call, rank);
        return;
      }
      try {
        arrived = dispatch(mode, call, rank);
        combine(mode, call, rank, arrived);
      } catch (const PeerTimeout& timeout) {
        reports[at(rank)] = timeout.report;
      }
      CHECK_THROWS(combine(mode, call, rank, arrived), Misuse);
    });
    const std::vector<std::string> phases{"high_throughput counts", "high_throughput dispatch",
                                          "high_throughput combine"};
    for (const int32_t rank : {0, 2}) {
      CHECK_EQ(reports[at(rank)].phase, phases[at(moment)]);
      CHECK_EQ(reports[at(rank)].rank, rank);
      CHECK_EQ(reports[at(rank)].peer, 1);
      CHECK(reports[at(rank)].expected > reports[at(rank)].actual);
      CHECK(reports[at(rank)].seconds >= kBound);
      CHECK(!reports[at(rank)].peer_gone);
    }
  }
}

// Rank 0 waits for rank 2 alone, which waits for rank 1: the timeouts of both name rank 1.
TEST(high_throughput_timeouts_name_the_end_of_a_chain_of_waits) {
  constexpr int32_t kRanks = 3;
  const Group memory = SymmetricMemory::in_process(options_of(kRanks, 1.5));
  std::vector<TimeoutReport> reports(kRanks);
  on_ranks(kRanks, [&](int32_t rank) {
    Exchange exchange(*memory[at(rank)], 0, memory[at(rank)]->bytes());
    exchange.begin(Phase::kHighThroughputCombine);
    if (rank == 1) return;
    const int32_t late_peer = rank == 0 ? 2 : 1;
    try {
      exchange.wait([] { return false; },
                    [&](int32_t peer) {
                      return peer == late_peer ? std::optional(Pending{5, 3}) : std::nullopt;
                    });
    } catch (const PeerTimeout& timeout) {
      reports[at(rank)] = timeout.report;
    }
  });
  CHECK_EQ(reports[0].peer, 1);
  CHECK_EQ(reports[2].peer, 1);
  CHECK_EQ(reports[2].expected, 5);
  CHECK_EQ(reports[2].actual, 3);
}

// Ranks 0 and 1 use different plans that are the same for rank 2: rank 2 must not complete the call
// either.
TEST(high_throughput_nobody_completes_what_two_disagree_about) {
  constexpr int32_t kRanks = 3;
  const World world = world_for(kRanks);
  on_ranks(kRanks, [&](int32_t rank) {
    Random jitter(static_cast<uint64_t>(rank));
    const Shape shape{.ranks = kRanks, .experts = 3, .top_k = 1, .hidden = 16, .most_tokens = 0};
    std::vector<Call> calls{Call(1, shape), Call(1, shape)};
    for (int64_t which : {0, 1}) {
      for (int32_t source = 0; source < kRanks; ++source) {
        const int64_t expert = source == 2 ? 2 : which == 0 ? source : 1 - source;
        calls[at(which)].set_token(source, expert);
      }
    }
    std::vector<Arrived> arrived;
    arrived.reserve(calls.size());
    for (const Call& call : calls) arrived.push_back(dispatch(world[rank], call, rank));
    for (int round = 0; round < 300 / kRoundsShare; ++round) {
      stall(jitter);
      bool completed = false;
      try {
        const size_t which = rank == 0 ? 1 : 0;
        combine(world[rank], calls[which], rank, arrived[which]);
        completed = true;
      } catch (const BadArgument&) {
        CHECK(rank != 2);
      } catch (const PeerRefused& refused) {
        CHECK(refused.report.peer != rank);
      }
      CHECK(!completed);
    }
    CHECK_EQ(combine(world[rank], calls[0], rank, arrived[0]), calls[0].result_of(rank));
  });
}

// The writer publishes the last chunk of a stream only after all ranks have agreed to the call.
TEST(high_throughput_last_chunk_waits_for_all_ranks) {
  SymmetricOptions options = options_of(2);
  options.hosts = {};  // one thread is both ranks, so nothing may be on its way
  const Group memory = SymmetricMemory::in_process(options);
  Exchange writing(*memory[0], 0, memory[0]->bytes());
  Exchange reading(*memory[1], 0, memory[1]->bytes());
  const StreamLayout layout = StreamLayout::of(4096, 256, RecordLayout{0, 0, 0, 0});
  const Exchange::Headers headers{
      .signature = {}, .records = {5, 5}, .rows = {0, 0}, .counts = nullptr};
  for (const int64_t records : {5, 0}) {
    for (Exchange* exchange : {&writing, &reading}) exchange->begin(Phase::kHighThroughputDispatch);
    StreamWriter writer(writing, layout, dispatch_to(writing, 0), records);
    StreamReader reader(reading, layout, dispatch_from(reading, 0));
    writing.send_headers(headers);
    reading.receive_headers(nullptr);
    CHECK(reading.agreed());
    reader.open(records);
    for (int64_t i = 0; i < records; ++i) {
      CHECK(writer.has_room());
      writer.advance();
    }
    const int64_t chunks = ceil_div(records, layout.records);
    for (; reader.arrived(); reader.advance()) {
    }
    CHECK(!writer.flush());
    CHECK(!writer.closed());
    CHECK(!reader.complete());
    const StreamPlace published = dispatch_from(reading, 0).published;
    CHECK_EQ(reading.chunks(published), records == 0 ? -1 : chunks - 1);
    reading.send_headers(headers);
    writing.receive_headers(nullptr);
    CHECK(writer.flush());
    CHECK(writer.closed());
    for (; reader.arrived(); reader.advance()) {
    }
    CHECK(reader.complete());
    CHECK_EQ(reading.chunks(published), chunks);
    reading.leave();
    writing.leave();
  }
}

TEST(high_throughput_wrong_order_is_misuse) {
  const World world = world_for(1);
  const Call call(1, Shape{.ranks = 1, .experts = 2, .top_k = 1, .hidden = 16, .most_tokens = 3});
  Arrived arrived = dispatch(world[0], call, 0);
  CHECK_THROWS(world[0].dispatch_rows(tokens_of(call, 0), arrived.plan(), arrived.room()), Misuse);
  HighThroughputPlan plan = arrived.plan();
  world[0].exchange_counts(tokens_of(call, 0), plan, 1);
  CHECK_THROWS(world[0].exchange_counts(tokens_of(call, 0), plan, 1), Misuse);
  CHECK_THROWS(combine(world[0], call, 0, arrived), Misuse);
  world[0].refuse_dispatch("start again");
  arrived = dispatch(world[0], call, 0);
  CHECK_EQ(combine(world[0], call, 0, arrived), call.result_of(0));
}

TEST(high_throughput_layout_of_any_row_and_ring) {
  Random random(3);
  for (int round = 0; round < 20000 / kRoundsShare; ++round) {
    const int64_t ring = random.between(1, 1 << 20);
    const int64_t row = 16 * random.between(0, 9000);
    const RecordLayout record{random.between(0, 32), random.between(0, 32), random.between(0, 600),
                              0};
    const StreamLayout layout = StreamLayout::of(ring, row, record);
    if (layout.chunks == 0) {
      CHECK(ring < StreamLayout::kLeastChunks * (record.side_bytes() + 2 * kRowAlignment));
      continue;
    }
    CHECK(layout.chunks >= StreamLayout::kLeastChunks);
    CHECK(layout.chunks * layout.chunk_bytes() <= ring);
    const int64_t piece = layout.record.piece_bytes;
    CHECK_EQ(piece % kRowAlignment, 0);
    CHECK(layout.pieces * piece >= row);
    CHECK(row == 0 || (layout.pieces - 1) * piece < row);
    const int64_t last = int64_t{layout.chunks} * layout.records - 1;
    CHECK(layout.side_offset(last) + record.side_bytes() <= layout.chunks * layout.chunk_bytes());
    CHECK(layout.payload_offset(last) + piece <= layout.chunks * layout.chunk_bytes());
    CHECK_EQ(layout.payload_offset(last + 1), layout.payload_offset(0));
    CHECK_EQ(layout.payload_offset(last) % kRowAlignment, 0);
  }
}

TEST(high_throughput_counts_of_routes) {
  const std::vector<int64_t> idx{0, 0, 5, -1, 3, 4, -1, -1, -1};
  std::vector<int32_t> per_rank(3);
  std::vector<int32_t> per_expert(6);
  std::vector<uint8_t> in_rank(9);
  const Routes routes{idx, 3, 3, 6, 3};
  for (const bool duplicates : {true, false}) {
    count_routes(routes, RouteCounts{per_rank, per_expert, in_rank, duplicates});
    CHECK_EQ(per_rank, (std::vector<int32_t>{1, 1, 2}));
    CHECK_EQ(per_expert, (std::vector<int32_t>{duplicates ? 2 : 1, 0, 0, 1, 1, 1}));
    CHECK_EQ(in_rank, (std::vector<uint8_t>{1, 0, 1, 0, 1, 1, 0, 0, 0}));
  }
  const TokenRanks ranks{in_rank, 3, 3};
  CHECK_EQ(ranks.count(), (std::vector<int64_t>{1, 1, 2}));
  CHECK_EQ(ranks.count_of({0, 1}), 2);
  CHECK(!ranks.any_of(2, {1, 2}));
}

// All numbers of terms, for columns that end inside a vector and inside a block.
TEST(reduce_bf16_rounds_every_step) {
  Random random(8);
  for (const int64_t columns : {1, 7, 8, 100, 512, 513, 1500}) {
    for (size_t count = 0; count < 11; ++count) {
      std::vector<std::vector<uint16_t>> rows(count + 2, std::vector<uint16_t>(at(columns)));
      for (auto& row : rows) {
        for (uint16_t& value : row) {
          const float real = random.real(-2.0f, 2.0f);
          value = random.one_in(9) ? uint16_t{0x8000} : reference::bf16_of(real);
        }
      }
      std::vector<ReduceTerm> terms;
      for (size_t i = 0; i < count; ++i) {
        // Every other row nearly cancels the row before it, so that the rounding errors of the
        // steps remain.
        if (i % 2 == 1) {
          for (size_t c = 0; c < at(columns); ++c) rows[i][c] = rows[i - 1][c] ^ 0x8000;
        }
        const float weight = i % 2 == 1 ? terms.back().weight : random.real(-1000.0f, 1000.0f);
        terms.push_back(ReduceTerm{rows[i].data(), i % 4 == 3 ? weight * 1.000001f : weight});
      }
      const uint16_t* biases[] = {rows[count].data(), rows[count + 1].data()};
      const size_t used = (count + 1) % 3;
      std::vector<uint16_t> out(at(columns));
      reduce_bf16(terms, std::span(biases, used), columns, out.data());
      for (size_t column = 0; column < out.size(); ++column) {
        volatile float sum = used > 0 ? reference::bf16_value(biases[0][column]) : 0.0f;
        if (used > 1) sum = sum + reference::bf16_value(biases[1][column]);
        for (const ReduceTerm& term : terms) {
          const volatile float product = term.weight * reference::bf16_value(term.row[column]);
          sum = sum + product;
        }
        CHECK_EQ(out[column], reference::bf16_of(sum));
      }
    }
  }
}
