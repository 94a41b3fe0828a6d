// Layouts: areas that never overlap, alignment, and sizes that end with the last area.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.hpp"
#include "layout/control.h"
#include "layout/low_latency.h"
#include "layout/row.h"

using namespace fanfold;

namespace {

struct Area {
  int64_t begin;
  int64_t end;
  int64_t alignment;
};

std::vector<LowLatencyGeometry> odd_geometries() {
  std::vector<LowLatencyGeometry> all;
  for (const int32_t ranks : {1, 2, 3, 5, 8, 72}) {
    for (const int32_t experts_per_rank : {1, 7, 128}) {
      for (const int32_t top_k : {1, 3, 8, 22, 32}) {
        for (const int32_t hidden : {16, 24, 136, 1024, 7168, 16384}) {
          for (const int32_t max_tokens : {0, 1, 7, 128, 4096}) {
            all.push_back({ranks, ranks * experts_per_rank, top_k, hidden, max_tokens});
          }
        }
      }
    }
  }
  return all;
}

// The bytes that each area needs, computed independently of the layout's own arithmetic.
std::vector<Area> areas_of(const LowLatencyLayout& layout) {
  const LowLatencyGeometry& g = layout.geometry;
  const int64_t slots = int64_t{2} * g.ranks * g.max_tokens;
  // Tables of all ranks, in bytes for each token and rank; each rank's begins on 16 bytes.
  const auto tables = [&](int64_t bytes) {
    return int64_t{2} * g.ranks * ((g.max_tokens * bytes + 15) / 16 * 16);
  };
  const int64_t row = int64_t{2} * g.hidden;
  const auto area = [](int64_t begin, int64_t bytes) {
    return Area{begin, begin + bytes, kAreaAlignment};
  };
  // 12 words, and the signatures (32 bytes each) of two calls of each kind, for every rank.
  return {area(0, (int64_t{8} * 12 + int64_t{32} * 4) * g.ranks),
          area(layout.rows_offset(), slots * row),
          area(layout.experts_offset(), tables(int64_t{2} * g.top_k)),
          area(layout.late_experts_offset(), tables(int64_t{2} * g.top_k)),
          area(layout.weights_offset(), tables(int64_t{4} * g.top_k)),
          area(layout.results_offset(), slots * row),
          area(layout.encodings_offset(), tables(1))};
}

}  // namespace

TEST(rounding_helpers) {
  CHECK_EQ(ceil_div(0, 16), 0);
  CHECK_EQ(ceil_div(1, 16), 1);
  CHECK_EQ(ceil_div(16, 16), 1);
  CHECK_EQ(ceil_div(17, 16), 2);
  CHECK_EQ(align_up(0, 128), 0);
  CHECK_EQ(align_up(129, 128), 256);
  CHECK_EQ(align_up((int64_t{1} << 40) + 1, 128), (int64_t{1} << 40) + 128);
}

TEST(a_slot_holds_every_encoding) {
  for (int64_t hidden = 16; hidden <= 65536; hidden += hidden < 4096 ? 8 : 1000) {
    CHECK(slot_bytes(hidden) >= bf16_row_bytes(hidden));
    CHECK(slot_bytes(hidden) >= logfmt_row_bytes(hidden));
    if (hidden % 16 == 0) CHECK(slot_bytes(hidden) >= fp8_row_bytes(hidden));
    CHECK_EQ(slot_bytes(hidden) % kRowAlignment, 0);
  }
}

TEST(encoded_rows_have_their_sizes) {
  CHECK_EQ(bf16_row_bytes(1024), 2048);
  CHECK_EQ(fp8_row_bytes(1024), 1024 + 8 * 4);
  CHECK_EQ(fp8_row_bytes(144), 144 + 2 * 4);
  CHECK_EQ(logfmt_row_bytes(128), 4 + 160);
  CHECK_EQ(logfmt_row_bytes(136), 8 + 170);
}

TEST(low_latency_areas_follow_each_other) {
  for (const LowLatencyGeometry& geometry : odd_geometries()) {
    const LowLatencyLayout layout{geometry};
    const std::vector<Area> areas = areas_of(layout);
    for (size_t i = 0; i < areas.size(); ++i) {
      CHECK_EQ(areas[i].begin % areas[i].alignment, 0);
      const int64_t next = i + 1 < areas.size() ? areas[i + 1].begin : layout.bytes();
      CHECK(areas[i].end <= next);
      CHECK(next - areas[i].end < kAreaAlignment);  // only alignment between them
    }
    CHECK_EQ(layout.bytes() % kAreaAlignment, 0);
  }
}

TEST(low_latency_slots_are_distinct_and_in_range) {
  for (const LowLatencyGeometry& geometry : odd_geometries()) {
    if (geometry.max_tokens > 128) continue;
    const LowLatencyLayout layout{geometry};
    int64_t expected = 0;
    for (int32_t parity = 0; parity < kParities; ++parity) {
      for (int32_t rank = 0; rank < geometry.ranks; ++rank) {
        for (int32_t token = 0; token < geometry.max_tokens; ++token) {
          CHECK_EQ(layout.slot(parity, rank, token), expected++);
        }
        CHECK_EQ(layout.table(parity, rank) * geometry.max_tokens, expected - geometry.max_tokens);
      }
    }
    CHECK_EQ(layout.slots(), expected);
  }
}

// Two billion slots of 128 KiB: sizes that would overflow a 32-bit product.
TEST(low_latency_sizes_do_not_overflow) {
  const LowLatencyGeometry geometry{64, 64, 32, 65536, 1 << 24};
  const LowLatencyLayout layout{geometry};
  const int64_t slots = int64_t{2} * 64 * (1 << 24);
  CHECK_EQ(geometry.expert_capacity(), slots / 2);
  CHECK_EQ(layout.slots(), slots);
  CHECK_EQ(layout.slot(1, 63, (1 << 24) - 1), slots - 1);
  const int64_t signals = LowLatencySignals{64}.bytes();
  CHECK_EQ(layout.bytes(), signals + slots * (int64_t{4} * 65536 + int64_t{8} * 32 + 1));
}

TEST(low_latency_signals_are_distinct_words) {
  using Kind = LowLatencySignals::Kind;
  for (const int32_t ranks : {1, 2, 3, 5, 8, 17, 72}) {
    const LowLatencySignals signals{ranks};
    std::vector<int64_t> offsets;
    for (int32_t peer = 0; peer < ranks; ++peer) {
      for (int32_t parity = 0; parity < kParities; ++parity) {
        for (const Kind kind : {Kind::kDispatchSignature, Kind::kDispatched,
                                Kind::kCombineSignature, Kind::kCombined, Kind::kLateRouting}) {
          offsets.push_back(signals.offset(kind, parity, peer));
        }
        for (const Kind kind : {Kind::kDispatchSignature, Kind::kCombineSignature}) {
          const int64_t signature = signals.signature_offset(kind, parity, peer);
          for (int64_t word = 0; word < 4; ++word) offsets.push_back(signature + 8 * word);
        }
      }
      for (const Kind kind : {Kind::kDispatchAck, Kind::kCombineAck}) {
        offsets.push_back(signals.offset(kind, 0, peer));
      }
    }
    std::sort(offsets.begin(), offsets.end());
    CHECK(std::adjacent_find(offsets.begin(), offsets.end()) == offsets.end());
    CHECK_EQ(offsets.front(), 0);
    CHECK(offsets.back() + 8 <= signals.bytes());
    for (const int64_t offset : offsets) CHECK_EQ(offset % 8, 0);
    CHECK_EQ(signals.bytes() % kAreaAlignment, 0);
  }
}

TEST(geometries_differ_in_every_field) {
  const LowLatencyGeometry geometry{4, 64, 8, 1024, 128};
  CHECK(geometry == (LowLatencyGeometry{4, 64, 8, 1024, 128}));
  CHECK(!(geometry == (LowLatencyGeometry{2, 64, 8, 1024, 128})));
  CHECK(!(geometry == (LowLatencyGeometry{4, 32, 8, 1024, 128})));
  CHECK(!(geometry == (LowLatencyGeometry{4, 64, 4, 1024, 128})));
  CHECK(!(geometry == (LowLatencyGeometry{4, 64, 8, 2048, 128})));
  CHECK(!(geometry == (LowLatencyGeometry{4, 64, 8, 1024, 64})));
  CHECK_EQ(geometry.experts_per_rank(), 16);
  CHECK_EQ(geometry.expert_capacity(), 512);
}

TEST(control_block_leaves_room_for_barriers) {
  CHECK_EQ(sizeof(ControlBlock) % kAreaAlignment, 0u);
  CHECK_EQ(sizeof(Doorbell) % kAreaAlignment, 0u);
  for (const int32_t ranks : {1, 2, 3, 15, 16, 17, 64, 100}) {
    const ControlLayout layout{ranks};
    CHECK(layout.barrier_offset() >= static_cast<int64_t>(sizeof(ControlBlock)));
    CHECK_EQ(layout.barrier_offset() % kAreaAlignment, 0);
    CHECK(layout.barrier_offset() + int64_t{8} * ranks <= layout.bytes());
    CHECK_EQ(layout.bytes() % kAreaAlignment, 0);
  }
}
