// The high-throughput layout of GPUs: areas do not overlap, words survive their encoding, and the
// bounds of the arguments guarantee both.
#include <cstdint>
#include <functional>
#include <set>
#include <vector>

#include "base/error.h"
#include "check.hpp"
#include "cuda/high_throughput.h"
#include "layout/high_throughput_device.h"

using namespace fanfold;
using cuda::HighThroughput;
using cuda::HighThroughputGrid;
using cuda::HighThroughputPlace;
using cuda::HighThroughputShape;

namespace {

HighThroughputPlace place_of(int32_t ranks, int64_t ring_bytes = 1 << 20) {
  HighThroughputPlace place{};
  place.rank = ranks - 1;
  place.ranks = ranks;
  for (int32_t peer = 0; peer < ranks; ++peer) {
    place.peers[static_cast<size_t>(peer)] = uintptr_t{4096} * static_cast<uintptr_t>(peer + 1);
  }
  place.timeout_ns = 5;
  place.max_tokens = 4096;
  place.ring_bytes = ring_bytes;
  return place;
}

HighThroughputShape shape_of(HighThroughputPhase phase) {
  HighThroughputShape shape{};
  shape.phase = phase;
  shape.experts = 48;
  shape.top_k = 8;
  shape.alignment = 1;
  shape.slices = 1;
  if (phase != HighThroughputPhase::kPlan) {
    shape.row_bytes = 1024;
    shape.slot_bytes = 1152;
  }
  return shape;
}

}  // namespace

TEST(high_throughput_device_areas_do_not_overlap) {
  for (const int32_t ranks : {1, 2, 3, 8, 32, 33, 1024}) {
    for (const int64_t ring : {0, 128, 100000}) {
      const auto at = cuda::high_throughput_offsets(ranks, ring);
      constexpr int64_t kColumns = HighThroughputDeviceLayout::kMostCounted;
      CHECK(at.counts - at.arrivals >= int64_t{2} * ranks * 8);
      CHECK(at.ready - at.counts >= int64_t{2} * ranks * (kColumns + ranks) * 8);
      CHECK(at.acks - at.ready >= int64_t{ranks} * kRingWords * 8);
      CHECK(at.ring - at.acks >= int64_t{ranks} * kRingWords * 8);
      CHECK(at.results - at.ring >= ranks * ring);
      for (const int64_t begin : {at.counts, at.ready, at.acks, at.ring, at.results}) {
        CHECK_EQ(begin % kAreaAlignment, int64_t{0});
      }
    }
  }
}

TEST(high_throughput_device_words_survive_their_encoding) {
  for (const uint32_t epoch : {0u, 1u, 0xfffffeu, 0xffffffu}) {
    for (const bool refused : {false, true}) {
      const ArrivalWord word{epoch, 0xbeef, ArrivalWord::kMostTokens, refused};
      const auto read = ArrivalWord::decode(word.encode());
      CHECK_EQ(read.epoch, epoch);
      CHECK_EQ(read.signature, word.signature);
      CHECK_EQ(read.tokens, word.tokens);
      CHECK_EQ(read.refused, refused);
    }
  }
  const auto batch = BatchWord::decode(BatchWord{0xfedcba98u, 0xffffffu, 0x81u}.encode());
  CHECK_EQ(batch.use, 0xfedcba98u);
  CHECK_EQ(batch.before, 0xffffffu);
  CHECK_EQ(batch.tokens, 0x81u);
  for (const int32_t ranks : {1, 32, 64, 65, 128, 129, 1024}) {
    const PlaceWord last{static_cast<uint32_t>(ranks - 1), (1u << PlaceWord::row_bits(ranks)) - 2};
    CHECK(last.encode(ranks) != PlaceWord::kNowhere);
    const auto place = PlaceWord::decode(last.encode(ranks), ranks);
    CHECK_EQ(place.rank, last.rank);
    CHECK_EQ(place.row, last.row);
  }
  CHECK(BatchWord::use_of(1, 0) != BatchWord::use_of(0, kMostTurns - 1));
}

TEST(high_throughput_device_batches_have_every_token_once) {
  for (const int32_t short_tokens : {0, 1, 11, 256}) {
    for (const int32_t tokens : {0, 1, 2, 7, 8, 9, 250, 263, 264, 265, 4096}) {
      const DispatchBatches batches(tokens, short_tokens);
      int32_t next = 0;
      for (int32_t batch = 0; batch < batches.count(); ++batch) {
        CHECK_EQ(batches.first_token(batch), next);
        next += batches.size(batch);
        if (batch + 1 < batches.count()) CHECK(next < tokens);
      }
      CHECK(next >= tokens && next < tokens + kShortBatchTokens);
      CHECK(tokens - batches.whole * kBatchTokens >= std::min(tokens, short_tokens));
    }
  }
}

TEST(high_throughput_device_slots_follow_from_the_ring) {
  const HighThroughput calls(place_of(4, 8 * 128 * 5));
  const HighThroughput roomy(place_of(4, 1 << 30));
  auto shape = shape_of(HighThroughputPhase::kDispatch);
  shape.slot_bytes = 128;
  CHECK_EQ(calls.slots(shape), 5);
  shape.kept_rings = 1;
  CHECK_EQ(calls.slots(shape), 5);
  shape.kept_rings = 4;
  CHECK_EQ(calls.slots(shape), 4 * 5);
  CHECK_EQ(roomy.slots(shape), kMostDispatchSlots);
  shape.kept_rings = 0;
  CHECK_EQ(roomy.slots(shape), kMostDispatchSlots);
  shape.in_place = 1;
  CHECK_EQ(roomy.slots(shape), kMostDispatchSlots);
  shape.expert_major = 1;
  CHECK_EQ(roomy.slots(shape), kMostDestinationSlots);
  CHECK(kDestinationsAt + kMostDestinationSlots * kBatchTokens <= kRingWords);
  shape.phase = HighThroughputPhase::kCombine;
  CHECK_EQ(roomy.slots(shape), kRingWords);
  shape.slices = kMostSlices;
  CHECK_EQ(roomy.slots(shape), kRingWords / kMostSlices);
  shape.slices = kMostSlices + 1;
  CHECK_THROWS(roomy.slots(shape), BadArgument);
  CHECK_EQ(roomy.slots(shape_of(HighThroughputPhase::kPlan)), 0);
  shape.slot_bytes = 256;
  CHECK_THROWS(calls.slots(shape), BadArgument);
}

TEST(high_throughput_device_arguments_are_filled_in) {
  const HighThroughput calls(place_of(3));
  const auto args =
      calls.dispatch_arguments(shape_of(HighThroughputPhase::kDispatch), {.ctas = 8, .senders = 3});
  CHECK_EQ(args.call.rank, 2);
  CHECK_EQ(reinterpret_cast<uintptr_t>(args.call.peers.few[2]), uintptr_t{4096 * 3});
  CHECK_EQ(args.call.senders, 3);
  CHECK_EQ(args.call.slots, calls.slots(shape_of(HighThroughputPhase::kDispatch)));
  CHECK_EQ(args.call.timeout_ns, int64_t{5});
}

TEST(high_throughput_device_signatures_differ_between_shapes) {
  const HighThroughput calls(place_of(4));
  std::vector<HighThroughputShape> shapes(12, shape_of(HighThroughputPhase::kDispatch));
  shapes[1].phase = HighThroughputPhase::kCombine;
  shapes[2].experts = 96;
  shapes[3].top_k = 7;
  shapes[4].row_bytes = 1040;
  shapes[5].scale_words = 1;
  shapes[6].slot_bytes = 1280;
  shapes[7].expert_major = 1;
  shapes[8].variant = 1;
  shapes[9].in_place = 1;
  shapes[10].slices = 2;
  shapes[11].kept_rings = 1;
  std::set<uint32_t> signatures;
  for (const auto& shape : shapes) {
    signatures.insert(calls.combine_arguments(shape, {.ctas = 4, .senders = 1}).call.signature);
  }
  CHECK_EQ(signatures.size(), shapes.size());
  auto plan = shape_of(HighThroughputPhase::kPlan);
  const auto first = calls.plan_arguments(plan, {.ctas = 4, .senders = 1}).call.signature;
  plan.alignment = 128;
  CHECK(calls.plan_arguments(plan, {.ctas = 4, .senders = 1}).call.signature != first);
}

TEST(high_throughput_device_refuses_what_its_words_cannot_hold) {
  const auto bad_place = [](const std::function<void(HighThroughputPlace&)>& change) {
    auto place = place_of(4);
    change(place);
    CHECK_THROWS(HighThroughput(place), BadArgument);
  };
  bad_place([](auto& place) { place.ranks = 1025; });
  bad_place([](auto& place) { place.rank = 4; });
  bad_place([](auto& place) { place.max_tokens = ArrivalWord::kMostTokens + 1; });
  const int32_t short_batches = kMostShortTokens / kShortBatchTokens;
  const int32_t most = (kMostTurns * 4 - short_batches - 1) * kBatchTokens;
  auto roomy = place_of(4);
  roomy.max_tokens = most;
  HighThroughput{roomy};
  CHECK(DispatchBatches(most, kMostShortTokens).count() <= kMostTurns * 4);
  bad_place([&](auto& place) { place.max_tokens = most + 1; });

  const HighThroughput calls(place_of(4));
  const HighThroughputGrid grid{.ctas = 8, .senders = 3};
  const auto bad_plan = [&](const std::function<void(HighThroughputShape&)>& change) {
    auto shape = shape_of(HighThroughputPhase::kPlan);
    change(shape);
    CHECK_THROWS(calls.plan_arguments(shape, grid), BadArgument);
  };
  bad_plan([](auto& shape) { shape.experts = 2052; });
  bad_plan([](auto& shape) { shape.experts = 62; });
  bad_plan([](auto& shape) { shape.alignment = 1 << 23; });

  const auto plan = shape_of(HighThroughputPhase::kPlan);
  for (const HighThroughputGrid bad : {HighThroughputGrid{1, 1}, HighThroughputGrid{8, 0},
                                       HighThroughputGrid{8, 8}, HighThroughputGrid{65, 11}}) {
    CHECK_THROWS(calls.plan_arguments(plan, bad), BadArgument);
  }
  const HighThroughput alone(place_of(1));
  CHECK_EQ(alone.plan_arguments(plan, {.ctas = 1, .senders = 1}).call.senders, 1);
}
