// The immediate: every field at its bounds, random words, and the parts that both sides count.
#include <cstdint>
#include <vector>

#include "check.hpp"
#include "layout/immediate.h"
#include "ranks.hpp"

using namespace fanfold;

namespace {

const std::vector<int32_t> kRanks = {1, 2, 3, 4, 5, 8, 63, 64, 65, 128, 1000, 1024, 4095, 4096};

void check_round_trip(const ImmediateLayout& layout, const Immediate& immediate) {
  const EncodedImmediate encoded = layout.encode(immediate);
  CHECK(encoded.fits);
  const DecodedImmediate decoded = layout.decode(encoded.word);
  CHECK_EQ(decoded.fault, ImmediateFault::kNone);
  CHECK_EQ(decoded.immediate.kind, immediate.kind);
  CHECK_EQ(decoded.immediate.source, immediate.source);
  CHECK_EQ(decoded.immediate.counter, immediate.counter);
  CHECK_EQ(decoded.immediate.sequence, immediate.sequence);
  CHECK_EQ(decoded.immediate.amount, immediate.amount);
}

void check_refused(const ImmediateLayout& layout, const Immediate& immediate) {
  const EncodedImmediate encoded = layout.encode(immediate);
  CHECK(!encoded.fits);
  CHECK(layout.decode(encoded.word).fault != ImmediateFault::kNone);
}

constexpr Immediate data(int32_t source, int32_t counter, uint32_t sequence, uint32_t parts) {
  return {ImmediateKind::kData, source, counter, sequence, parts};
}

}  // namespace

TEST(immediate_keeps_every_field) {
  for (const int32_t ranks : kRanks) {
    const ImmediateLayout layout = ImmediateLayout::of(ranks);
    for (const int32_t source : {0, ranks / 2, ranks - 1}) {
      for (const int32_t counter : {0, 1, kCounters - 1}) {
        for (const uint32_t sequence : {0u, 1u, 127u, 128u, 255u}) {
          for (const uint32_t amount : {1u, 2u, layout.most_amount()}) {
            check_round_trip(layout, data(source, counter, sequence, amount));
            check_round_trip(layout, {ImmediateKind::kSignal, source, counter, sequence, amount});
          }
        }
      }
      for (const uint32_t amount : {0u, 1u, 0x10000u, layout.acknowledgement_mask()}) {
        check_round_trip(layout, {ImmediateKind::kAcknowledgement, source, 0, 0, amount});
      }
    }
  }
}

TEST(immediate_refuses_every_field_beyond_its_width) {
  for (const int32_t ranks : kRanks) {
    const ImmediateLayout layout = ImmediateLayout::of(ranks);
    const uint32_t most = layout.most_amount();
    check_round_trip(layout, data(ranks - 1, kCounters - 1, 255, most));
    check_refused(layout, data(ranks, 0, 0, 1));
    check_refused(layout, data(-1, 0, 0, 1));
    check_refused(layout, data(0, kCounters, 0, 1));
    check_refused(layout, data(0, -1, 0, 1));
    check_refused(layout, data(0, 0, 256, 1));
    check_refused(layout, data(0, 0, 0, 0));
    check_refused(layout, data(0, 0, 0, most + 1));
    check_refused(layout, data(0, 0, 0, 0xffffffffu));
    check_round_trip(layout, {ImmediateKind::kStore, ranks - 1, 0, 255, 1});
    check_refused(layout, {ImmediateKind::kStore, 0, 1, 0, 1});
    check_refused(layout, {ImmediateKind::kStore, 0, 0, 0, 2});
    check_refused(layout, {static_cast<ImmediateKind>(4), 0, 0, 0, 1});
    check_refused(layout,
                  {ImmediateKind::kAcknowledgement, 0, 0, 0, layout.acknowledgement_mask() + 1});
    check_refused(layout, {ImmediateKind::kAcknowledgement, ranks, 0, 0, 0});
  }
}

TEST(immediate_layout_of_a_bad_number_of_ranks_accepts_nothing) {
  for (const int32_t ranks : {INT32_MIN, -1, 0, kMostProxyRanks + 1, INT32_MAX}) {
    const ImmediateLayout layout = ImmediateLayout::of(ranks);
    CHECK(!layout.valid());
    check_refused(layout, data(0, 0, 0, 1));
    for (const uint32_t word : {0u, 1u, 2u, 0x10000u}) {
      CHECK_EQ(layout.decode(word).fault, ImmediateFault::kRanks);
    }
  }
}

// Whatever the network delivers, what `decode` accepts indexes the tables of a receiver, and is
// what a sender would have encoded.
TEST(immediate_from_the_network_never_leads_outside_of_a_table) {
  Random random(7);
  int64_t accepted = 0;
  int64_t refused = 0;
  for (const int32_t ranks : kRanks) {
    const ImmediateLayout layout = ImmediateLayout::of(ranks);
    for (int round = 0; round < 200'000 / kRoundsShare; ++round) {
      const auto word = static_cast<uint32_t>(random.next());
      const DecodedImmediate decoded = layout.decode(word);
      if (decoded.fault != ImmediateFault::kNone) {
        ++refused;
        continue;
      }
      ++accepted;
      const Immediate& i = decoded.immediate;
      CHECK(i.source >= 0 && i.source < ranks);
      CHECK(i.counter >= 0 && i.counter < kCounters);
      CHECK(i.sequence < 256);
      CHECK_EQ(layout.encode(i).word, word);
    }
  }
  CHECK(accepted > 0);
  CHECK(refused > 0);
}

TEST(immediate_names_the_field_that_is_wrong) {
  const ImmediateLayout layout = ImmediateLayout::of(5);
  CHECK_EQ(layout.decode(3).fault, ImmediateFault::kAmount);
  CHECK_EQ(layout.decode(3 | 1u << 5).fault, ImmediateFault::kCounter);
  for (const uint32_t source : {5u, 6u, 7u}) {
    CHECK_EQ(layout.decode(source << 2).fault, ImmediateFault::kSource);
  }
  CHECK_EQ(layout.decode(4u << 2).fault, ImmediateFault::kAmount);
  CHECK_EQ(layout.decode(1u | 4u << 2).fault, ImmediateFault::kAmount);
  CHECK_EQ(layout.decode(2u | 4u << 2).fault, ImmediateFault::kNone);
}

TEST(parts_cover_the_bytes) {
  for (const int64_t part : {int64_t{1}, int64_t{16}, int64_t{4096}, int64_t{1} << 18}) {
    CHECK(part > 0);
    for (const int64_t whole : {int64_t{1}, int64_t{2}, int64_t{63}, int64_t{1000}}) {
      CHECK_EQ(parts_of(whole * part, part), whole);
      CHECK_EQ(parts_of(whole * part + 1, part), whole + 1);
    }
    CHECK_EQ(parts_of(0, part), 1);
    CHECK_EQ(parts_of(1, part), 1);
    CHECK_EQ(parts_of((int64_t{1} << 32) - 1, part), ((int64_t{1} << 32) - 1 + part - 1) / part);
  }
}
