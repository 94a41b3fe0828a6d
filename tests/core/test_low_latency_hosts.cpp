// The memory through which ranks of several hosts reach each other in the low-latency mode of GPUs.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.hpp"
#include "layout/low_latency_hosts.h"

using namespace fanfold;

namespace {

struct Area {
  int64_t begin;
  int64_t end;
};

// Every area, with the bytes that it needs, computed independently of the layout's own arithmetic.
std::vector<Area> areas_of(const LowLatencyHostsLayout& layout) {
  const LowLatencyGeometry& g = layout.geometry;
  std::vector<Area> areas;
  const auto add = [&](int64_t begin, int64_t bytes) { areas.push_back({begin, begin + bytes}); };
  const auto headers = int64_t{g.max_tokens} * g.top_k * 8;
  for (int32_t source = 0; source < g.ranks; ++source) {
    add(LowLatencyHostsLayout::ack(source), 8);
    for (int32_t parity = 0; parity < 2; ++parity) {
      for (const auto word : {HostWord::kDispatch, HostWord::kCombine, HostWord::kCombineRows}) {
        add(layout.word(word, parity, source), 8);
      }
      for (const CallKind kind : {CallKind::kDispatch, CallKind::kCombine}) {
        if (kind == CallKind::kDispatch) {
          add(layout.block(kind, parity, source), int64_t{4} * g.experts_per_rank());
        }
        add(layout.headers(kind, parity, source), headers);
        add(layout.rows(kind, parity, source), int64_t{g.max_tokens} * g.hidden * 2);
      }
    }
  }
  return areas;
}

std::vector<LowLatencyHostsLayout> many_layouts() {
  std::vector<LowLatencyHostsLayout> all;
  for (const int32_t ranks : {1, 2, 3, 33}) {
    for (const int32_t local : {1, 3, 8}) {
      for (const int32_t top_k : {1, 3, 8}) {
        for (const int32_t hidden : {16, 136, 7168}) {
          for (const int32_t max_tokens : {0, 1, 7, 128}) {
            all.push_back({{ranks, ranks * local, top_k, hidden, max_tokens}});
          }
        }
      }
    }
  }
  return all;
}

}  // namespace

// A write carries whole units of 16 bytes, so the areas of two sources share none.
TEST(areas_between_hosts_share_no_unit) {
  for (const LowLatencyHostsLayout& layout : many_layouts()) {
    std::vector<Area> areas = areas_of(layout);
    std::erase_if(areas, [](const Area& area) { return area.begin == area.end; });
    std::sort(areas.begin(), areas.end(),
              [](const Area& a, const Area& b) { return a.begin < b.begin; });
    for (size_t i = 0; i + 1 < areas.size(); ++i) {
      const bool words = areas[i].end - areas[i].begin == 8;  // stores, which carry no unit
      CHECK((words ? areas[i].end : align_up(areas[i].end, 16)) <= areas[i + 1].begin);
    }
    CHECK(areas.back().end <= layout.bytes());
    CHECK_EQ(layout.bytes() % kAreaAlignment, 0);
  }
}

// So that a dispatch's counts and headers travel as one write, which ends before the rows.
TEST(tables_between_hosts_lie_side_by_side) {
  for (const LowLatencyHostsLayout& layout : many_layouts()) {
    const int32_t last = layout.geometry.ranks - 1;
    for (const CallKind kind : {CallKind::kDispatch, CallKind::kCombine}) {
      const int64_t block = layout.block(kind, 1, last);
      const int64_t headers = layout.headers(kind, 1, last);
      CHECK_EQ(block % 16, 0);
      CHECK_EQ(headers, block + layout.counts_bytes(kind));
      CHECK(headers + layout.header_bytes(layout.geometry.max_tokens) <=
            layout.rows(kind, 1, last));
      CHECK_EQ(layout.rows(kind, 1, last) % kAreaAlignment, 0);
    }
  }
}
