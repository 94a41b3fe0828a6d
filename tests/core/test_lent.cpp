// Arrays that are too short for a call, and handles that the caller has overwritten: the core
// refuses the call on all ranks before it sends rows, and does not access memory out of bounds.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "high_throughput_call.hpp"
#include "host/high_throughput.h"
#include "host/low_latency.h"
#include "host/routes.h"
#include "low_latency_world.hpp"
#include "ranks.hpp"

using namespace fanfold;

namespace {

// The array without its last element.
template <typename T>
Array<T> shorter(const Array<T>& array) {
  return {array.data(), array.size() - 1};
}

// The argument that BadArgument names if `call` throws it, else an empty string.
std::string refused_argument(const std::function<void()>& call) {
  try {
    call();
  } catch (const BadArgument& error) {
    return error.argument;
  }
  return "";
}

LowLatencyTokens tokens_of(const fanfold::Call& call, int32_t rank) {
  const fanfold::Batch& own = call.batch(rank);
  return {.x = own.x,
          .topk_idx = own.topk_idx,
          .topk_weights = own.topk_weights,
          .global_scale = nullptr,
          .weighted = true,
          .tokens = own.tokens,
          .encoding = call.options().encoding};
}

// A call in which every rank has tokens.
fanfold::Call full_call(int32_t ranks, RowEncoding encoding = RowEncoding::kFp8PowerOfTwo) {
  CallOptions options{};
  options.geometry = {ranks, 2 * ranks, 2 * ranks, 144, 3};
  options.encoding = encoding;
  options.scale_format =
      encoding == RowEncoding::kBf16 ? ScaleFormat::kFloat32 : ScaleFormat::kUe8m0;
  const auto full = [&](uint64_t seed) {
    const fanfold::Call call(seed, options);
    bool all = true;
    for (int32_t rank = 0; rank < ranks; ++rank) all = all && call.batch(rank).tokens > 0;
    return all;
  };
  uint64_t seed = 0;
  while (seed < 1000 && !full(seed)) ++seed;
  return fanfold::Call(seed, options);
}

struct LowLatencyWorld {
  explicit LowLatencyWorld(const fanfold::Call& call)
      : memory(SymmetricMemory::in_process(
            options_for(call.geometry().ranks, LowLatencyLayout{call.geometry()}.bytes()))) {
    for (const auto& own : memory) {
      modes.push_back(std::make_unique<LowLatency>(*own, 0, own->bytes()));
    }
  }

  Group memory;
  std::vector<std::unique_ptr<LowLatency>> modes;
};

}  // namespace

TEST(lent_low_latency_sends_check_what_they_read) {
  const fanfold::Call call = full_call(1);
  const LowLatencyWorld world(call);
  LowLatency& mode = *world.modes[0];
  const auto refused = [&](const std::function<void(LowLatencyTokens&)>& change) {
    LowLatencyTokens tokens = tokens_of(call, 0);
    change(tokens);
    return refused_argument([&] { mode.dispatch_send(call.geometry(), tokens); });
  };
  CHECK_EQ(refused([](LowLatencyTokens& t) { t.x = shorter(t.x); }), "x");
  CHECK_EQ(refused([](LowLatencyTokens& t) { t.topk_idx = shorter(t.topk_idx); }), "topk_idx");
  CHECK_EQ(refused([](LowLatencyTokens& t) { t.topk_weights = nullptr; }), "topk_weights");
  CHECK_EQ(refused([](LowLatencyTokens& t) { t.tokens = 4; }), "tokens");
  CHECK_EQ(refused([](LowLatencyTokens& t) { t.encoding = RowEncoding::kNvfp4; }), "global_scale");
  Random jitter(0);
  run_call(mode, call, 0, {false}, jitter);
}

TEST(lent_low_latency_receives_check_what_they_write) {
  const fanfold::Call call = full_call(1);
  const LowLatencyWorld world(call);
  LowLatency& mode = *world.modes[0];
  const uint32_t epoch = send(mode, call, 0);
  Arrived arrived(call);
  const auto refused = [&](const std::function<void(LowLatencyReceived&)>& change) {
    LowLatencyReceived received = arrived.view();
    const int64_t columns = call.geometry().hidden;
    const int64_t places = call.geometry().experts_per_rank() * call.geometry().expert_capacity();
    received.rows = {received.rows.data(), places * columns};
    received.scales = {received.scales.data(), places * 4};
    change(received);
    return refused_argument([&] { mode.dispatch_receive(epoch, received); });
  };
  using R = LowLatencyReceived;
  CHECK_EQ(refused([](R& r) { r.rows = shorter(r.rows); }), "rows");
  CHECK_EQ(refused([](R& r) { r.scales = shorter(r.scales); }), "scales");
  CHECK_EQ(refused([](R& r) { r.encoding = RowEncoding::kNvfp4; }), "scales");  // in tiles
  CHECK_EQ(refused([](R& r) { r.counts = shorter(r.counts); }), "counts");
  CHECK_EQ(refused([](R& r) { r.source_tokens = shorter(r.source_tokens); }), "source_tokens");
  CHECK_EQ(refused([](R& r) { r.ranges = shorter(r.ranges); }), "ranges");
  CHECK_EQ(refused([](R& r) { r.row_weights = shorter(r.row_weights); }), "row_weights");
  CHECK_EQ(refused([](R& r) { r.source_counts = shorter(r.source_counts); }), "source_counts");
  CHECK_EQ(refused([](R& r) { r.experts = shorter(r.experts); }), "experts");
  CHECK_EQ(refused([](R& r) { r.weights = shorter(r.weights); }), "weights");
  CHECK_EQ(refused([](R& r) { r.expert_totals = shorter(r.expert_totals); }), "expert_totals");
  CHECK_EQ(refused([](R& r) { r.wait_ns = shorter(r.wait_ns); }), "wait_ns");
  CHECK_EQ(refused([](R&) {}), "");  // the refused calls have read and written nothing
  check_arrived(call, 0, arrived, {false});
}

TEST(lent_low_latency_combines_check_arrays_and_handles) {
  const fanfold::Call call = full_call(1, RowEncoding::kBf16);
  const LowLatencyWorld world(call);
  LowLatency& mode = *world.modes[0];
  Arrived arrived = receive(mode, call, send(mode, call, 0));
  const Answers answers(call, 0, {false});
  const fanfold::Batch& own = call.batch(0);
  const auto refused = [&](const std::function<void(LowLatencyOutputs&)>& change) {
    LowLatencyOutputs outputs{.y = answers.y,
                              .expert_stride = answers.expert_stride,
                              .row_stride = answers.row_stride,
                              .ranges = arrived.ranges,
                              .source_counts = arrived.source_counts,
                              .experts = arrived.experts,
                              .weights = arrived.weights,
                              .late_tokens = nullptr,
                              .logfmt = false};
    change(outputs);
    return refused_argument([&] { mode.combine_send(call.geometry(), outputs); });
  };
  using O = LowLatencyOutputs;
  const int64_t used = answers.expert_stride +
                       (call.geometry().expert_capacity() - 1) * answers.row_stride +
                       call.geometry().hidden;
  CHECK_EQ(refused([&](O& o) { o.y = {o.y.data(), used - 1}; }), "y");
  CHECK_EQ(refused([](O& o) { o.ranges = shorter(o.ranges); }), "ranges");
  CHECK_EQ(refused([](O& o) { o.source_counts = shorter(o.source_counts); }), "source_counts");
  CHECK_EQ(refused([](O& o) { o.experts = shorter(o.experts); }), "experts");
  CHECK_EQ(refused([](O& o) { o.weights = shorter(o.weights); }), "weights");
  const auto blocks = static_cast<int32_t>((call.geometry().expert_capacity() + 1) / 2);
  const std::vector<int32_t> signals(
      static_cast<size_t>(call.geometry().experts_per_rank() * blocks), 1);
  const Array<const int32_t> all(signals);
  CHECK_EQ(refused([&](O& o) { o.ready = {shorter(all), 2, blocks, 1}; }), "signals");
  CHECK_EQ(refused([&](O& o) { o.ready = {all, 2, blocks - 1, 1}; }), "blocks");
  CHECK_EQ(refused([&](O& o) { o.ready = {all, 0, blocks, 1}; }), "block_rows");
  const int64_t range = std::exchange(arrived.ranges[1], int64_t{1} << 40);
  CHECK_EQ(refused([](O&) {}), "ranges[1] of the handle");
  arrived.ranges[1] = range;
  const int32_t count = std::exchange(arrived.source_counts[0], 4);
  CHECK_EQ(refused([](O&) {}), "source_counts[0] of the handle");
  arrived.source_counts[0] = count;
  const uint32_t epoch = answer(mode, call, 0, arrived, {false});
  std::vector<uint16_t> out(own.x.size());
  LowLatencyResult result{
      .out = out, .topk_idx = own.topk_idx, .tokens = own.tokens, .wait_ns = nullptr};
  result.out = shorter(result.out);
  CHECK_EQ(refused_argument([&] { mode.combine_receive(epoch, result); }), "out");
  result.out = out;
  result.topk_idx = shorter(result.topk_idx);
  CHECK_EQ(refused_argument([&] { mode.combine_receive(epoch, result); }), "topk_idx");
  check_result(call, 0, collect(mode, call, 0, epoch), {false});
}

// Indices that the caller overwrites between the halves of a combine contribute nothing.
TEST(lent_low_latency_indices_may_change_under_a_combine) {
  const fanfold::Call call = full_call(1, RowEncoding::kBf16);
  const LowLatencyWorld world(call);
  LowLatency& mode = *world.modes[0];
  const Arrived arrived = receive(mode, call, send(mode, call, 0));
  const uint32_t epoch = answer(mode, call, 0, arrived, {false});
  const std::vector<int64_t> indices(call.batch(0).topk_idx.size(), int64_t{1} << 40);
  std::vector<uint16_t> out(call.batch(0).x.size(), 0xffff);
  mode.combine_receive(
      epoch, {.out = out, .topk_idx = indices, .tokens = call.batch(0).tokens, .wait_ns = nullptr});
  CHECK_EQ(out, std::vector<uint16_t>(out.size(), 0));
}

TEST(lent_low_latency_refusals_reach_the_peers) {
  constexpr int32_t kRanks = 3;
  const fanfold::Call call = full_call(kRanks);
  const LowLatencyWorld world(call);
  on_ranks(kRanks, [&](int32_t rank) {
    LowLatency& mode = *world.modes[static_cast<size_t>(rank)];
    if (rank == 1) {
      LowLatencyTokens tokens = tokens_of(call, rank);
      tokens.x = shorter(tokens.x);
      CHECK_THROWS(mode.dispatch_send(call.geometry(), tokens), BadArgument);
    } else {
      CHECK_THROWS(receive(mode, call, send(mode, call, rank)), PeerRefused);
    }
    Random jitter(0);
    run_call(mode, call, rank, std::vector<bool>(kRanks, false), jitter);
  });
}

namespace {

namespace ht = fanfold::high_throughput;

struct HighThroughputWorld {
  explicit HighThroughputWorld(int32_t ranks)
      : memory(SymmetricMemory::in_process(
            options_for(ranks, HighThroughputLayout{ranks}.bytes(8 << 10)))) {
    for (const auto& own : memory) {
      modes.push_back(std::make_unique<HighThroughput>(*own, 0, own->bytes()));
    }
  }
  HighThroughput& operator[](int32_t rank) const { return *modes[static_cast<size_t>(rank)]; }

  Group memory;
  std::vector<std::unique_ptr<HighThroughput>> modes;
};

ht::Shape shape_of(int32_t ranks) {
  ht::Shape shape{.ranks = ranks, .experts = 2 * ranks, .top_k = 2, .hidden = 32, .most_tokens = 9};
  shape.scale_words = 3;
  shape.expert_major = true;
  return shape;
}

ht::Arrived dispatched(HighThroughput& mode, const ht::Call& call, int32_t rank) {
  ht::Arrived arrived(call, rank);
  HighThroughputPlan plan = arrived.plan();
  const HighThroughputTokens tokens = ht::tokens_of(call, rank);
  mode.exchange_counts(tokens, plan, call.shape().alignment);
  arrived.received = plan.received;
  const HighThroughputReceived room = arrived.allocate();
  mode.dispatch_rows(tokens, arrived.plan(), room);
  return arrived;
}

// The first call, by seed, in which rank 0 has tokens and receives rows.
ht::Call busy_call(const ht::Shape& shape) {
  uint64_t seed = 0;
  while (seed < 1000 && ht::Call(seed, shape).rows_of(0).size() < 2) ++seed;
  return ht::Call(seed, shape);
}

}  // namespace

TEST(lent_high_throughput_dispatches_check_arrays) {
  const ht::Call call = busy_call(shape_of(1));
  const HighThroughputWorld world(1);
  ht::Arrived arrived = dispatched(world[0], call, 0);
  const auto refused = [&](const std::function<void(HighThroughputTokens&)>& change,
                           const std::function<void(HighThroughputPlan&)>& change_plan,
                           const std::function<void(HighThroughputReceived&)>& change_room) {
    HighThroughputTokens tokens = ht::tokens_of(call, 0);
    HighThroughputPlan plan = arrived.plan();
    const HighThroughputReceived whole = arrived.room();
    HighThroughputReceived room = whole;
    change(tokens);
    change_plan(plan);
    change_room(room);
    return refused_argument([&] { world[0].dispatch_cached(tokens, plan, room); });
  };
  const auto same = [](auto&) {};
  using T = HighThroughputTokens;
  using P = HighThroughputPlan;
  using R = HighThroughputReceived;
  CHECK_EQ(refused([](T& t) { t.rows = shorter(t.rows); }, same, same), "x");
  CHECK_EQ(refused([](T& t) { t.scales = shorter(t.scales); }, same, same), "scales");
  CHECK_EQ(refused(same, [](P& p) { p.rows_of = shorter(p.rows_of); }, same), "plan.rows_of");
  CHECK_EQ(refused(same, [](P& p) { p.source_token = nullptr; }, same), "plan.source_token");
  CHECK_EQ(refused(same, [](P& p) { p.offsets = shorter(p.offsets); }, same), "plan.offsets");
  CHECK_EQ(refused(same, [](P& p) { p.source_prefix = nullptr; }, same), "plan.source_prefix");
  CHECK_EQ(refused(
               same, [](P& p) { p.is_token_in_rank = shorter(p.is_token_in_rank); }, same),
           "plan.is_token_in_rank");
  CHECK_EQ(refused(same, same, [](R& r) { r.rows = shorter(r.rows); }), "rows");
  CHECK_EQ(refused(same, same, [](R& r) { r.scales = shorter(r.scales); }), "scales");
  CHECK_EQ(refused(same, same, [](R& r) { r.row_weights = shorter(r.row_weights); }),
           "row_weights");
  CHECK_EQ(refused(same, same, [](R& r) { r.row_source_rank = nullptr; }), "row_source_rank");
  CHECK_EQ(refused(same, same, [](R& r) { r.row_source_token = nullptr; }), "row_source_token");
  CHECK_EQ(refused(same, same, [](R& r) { r.capacity = 0; }), "capacity");
  CHECK_EQ(refused(same, same, same), "");
  arrived.check_rows(0);
}

TEST(lent_high_throughput_counts_check_arrays) {
  const ht::Call call = busy_call(shape_of(1));
  const HighThroughputWorld world(1);
  ht::Arrived arrived(call, 0);
  const auto refused = [&](const std::function<void(HighThroughputTokens&)>& change,
                           const std::function<void(HighThroughputPlan&)>& change_plan) {
    HighThroughputTokens tokens = ht::tokens_of(call, 0);
    HighThroughputPlan plan = arrived.plan();
    change(tokens);
    change_plan(plan);
    return refused_argument([&] { world[0].exchange_counts(tokens, plan, 1); });
  };
  const auto same = [](auto&) {};
  using T = HighThroughputTokens;
  using P = HighThroughputPlan;
  CHECK_EQ(refused([](T& t) { t.topk_idx = shorter(t.topk_idx); }, same), "topk_idx");
  CHECK_EQ(refused([](T& t) { t.topk_weights = shorter(t.topk_weights); }, same), "topk_weights");
  CHECK_EQ(refused(same, [](P& p) { p.tokens_per_expert = nullptr; }), "plan.tokens_per_expert");
  CHECK_EQ(refused(same, [](P& p) { p.is_token_in_rank = nullptr; }), "plan.is_token_in_rank");
  dispatched(world[0], call, 0).check_plan(0);
}

TEST(lent_high_throughput_combines_check_arrays) {
  ht::Shape shape = shape_of(1);
  shape.returns_weights = true;
  const ht::Call call = busy_call(shape);
  const HighThroughputWorld world(1);
  ht::Arrived arrived = dispatched(world[0], call, 0);
  const HighThroughputPlan plan = arrived.plan();
  const int64_t rows = plan.offsets[plan.experts];
  const std::vector<float> factors(static_cast<size_t>(rows), 1.0f);
  const std::vector<uint16_t> y(static_cast<size_t>(rows * shape.hidden), 0x3f80);
  std::vector<uint16_t> out(call.batch(0).x.size());
  std::vector<float> weights(call.batch(0).topk_idx.size());
  const auto refused = [&](const std::function<void(HighThroughputOutputs&)>& change,
                           const std::function<void(HighThroughputResult&)>& change_result) {
    HighThroughputOutputs outputs{.y = y,
                                  .hidden = shape.hidden,
                                  .row_weights = factors,
                                  .topk_weights = factors,
                                  .weighted = true,
                                  .expert_major = true};
    HighThroughputResult result{.out = out, .bias = {out, nullptr}, .weights = weights};
    change(outputs);
    change_result(result);
    return refused_argument([&] { world[0].combine(outputs, plan, result); });
  };
  const auto same = [](auto&) {};
  using O = HighThroughputOutputs;
  using R = HighThroughputResult;
  CHECK_EQ(refused([](O& o) { o.y = shorter(o.y); }, same), "y");
  CHECK_EQ(refused([](O& o) { o.row_weights = shorter(o.row_weights); }, same), "row_weights");
  CHECK_EQ(refused([](O& o) { o.topk_weights = shorter(o.topk_weights); }, same), "topk_weights");
  CHECK_EQ(refused(same, [](R& r) { r.out = shorter(r.out); }), "out");
  CHECK_EQ(refused(same, [](R& r) { r.bias[0] = shorter(r.bias[0]); }), "bias");
  CHECK_EQ(refused(same, [](R& r) { r.weights = shorter(r.weights); }), "weights");
  CHECK_EQ(refused(same, same), "");
}

TEST(lent_high_throughput_plans_that_were_written_over) {
  constexpr int32_t kRanks = 2;
  const ht::Call call = busy_call(shape_of(kRanks));
  const HighThroughputWorld world(kRanks);
  const std::vector<std::pair<std::string, std::function<void(HighThroughputPlan&)>>> changes{
      {"plan.rows_of[0]", [](HighThroughputPlan& p) { p.rows_of[0] = 1 << 20; }},
      {"plan.rows_of[1]", [](HighThroughputPlan& p) { p.rows_of[1] = -2; }},
      {"plan.source_prefix[0]", [](HighThroughputPlan& p) { p.source_prefix[0] = -1; }},
      {"plan.source_prefix[1]", [](HighThroughputPlan& p) { p.source_prefix[1] += 1; }},
      {"plan.tokens_per_expert[1]", [](HighThroughputPlan& p) { p.tokens_per_expert[1] += 64; }},
      {"plan.offsets[0]", [](HighThroughputPlan& p) { p.offsets[0] = -8; }},
      {"plan.tokens_per_expert[0]", [](HighThroughputPlan& p) { p.offsets[1] = -1; }},
  };
  on_ranks(kRanks, [&](int32_t rank) {
    for (const auto& [name, change] : changes) {
      ht::Arrived arrived = dispatched(world[rank], call, rank);
      const HighThroughputTokens tokens = ht::tokens_of(call, rank);
      HighThroughputPlan plan = arrived.plan();
      const HighThroughputReceived room = arrived.room();
      if (rank == 0) {
        change(plan);
        CHECK_EQ(refused_argument([&] { world[rank].dispatch_cached(tokens, plan, room); }), name);
      } else {
        CHECK_THROWS(world[rank].dispatch_cached(tokens, plan, room), PeerRefused);
      }
    }
  });
}

TEST(lent_routes_check_arrays) {
  const std::vector<int64_t> idx{0, 1, 2, 3};
  std::vector<int32_t> per_rank(2);
  std::vector<int32_t> per_expert(4);
  std::vector<uint8_t> in_rank(4);
  const Routes routes{idx, 2, 2, 4, 2};
  const auto refused = [&](const Routes& given, const RouteCounts& counts) {
    return refused_argument([&] { count_routes(given, counts); });
  };
  const RouteCounts counts{per_rank, per_expert, in_rank, true};
  CHECK_EQ(refused(Routes{shorter(routes.topk_idx), 2, 2, 4, 2}, counts), "topk_idx");
  CHECK_EQ(refused(routes, {shorter(counts.tokens_per_rank), per_expert, in_rank, true}),
           "tokens_per_rank");
  CHECK_EQ(refused(routes, {per_rank, shorter(counts.tokens_per_expert), in_rank, true}),
           "tokens_per_expert");
  CHECK_EQ(refused(routes, {per_rank, per_expert, shorter(counts.is_token_in_rank), true}),
           "is_token_in_rank");
  CHECK_EQ(refused(routes, counts), "");
}
