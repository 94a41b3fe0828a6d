// The low-latency layout of GPUs: areas do not overlap, words survive their encoding and never
// equal the sentinel, and the bounds of the arguments guarantee all three.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "check.hpp"
#include "cuda/low_latency.h"
#include "layout/low_latency_device.h"

using namespace fanfold;

namespace {

struct Area {
  int64_t begin;
  int64_t bytes;
};

std::vector<LowLatencyDeviceLayout> many_layouts() {
  std::vector<LowLatencyDeviceLayout> all;
  for (const int32_t ranks : {1, 2, 3, 5, 8, 32}) {
    for (const int32_t experts_per_rank : {1, 2, 7, 64}) {
      for (const int32_t top_k : {1, 3, 8, 22, 32}) {
        for (const int32_t hidden : {16, 24, 136, 2048, 7168, 16384}) {
          for (const int32_t max_tokens : {0, 1, 7, 128, 4096}) {
            const LowLatencyGeometry geometry{ranks, ranks * experts_per_rank, top_k, hidden,
                                              max_tokens};
            all.push_back({.geometry = geometry, .late = true});
            for (const bool token_major : {false, true}) {
              all.push_back({.geometry = geometry, .late = false, .token_major = token_major});
            }
          }
        }
      }
    }
  }
  return all;
}

// The bytes that each area needs, computed independently of the layout's own arithmetic.
std::vector<Area> areas_of(const LowLatencyDeviceLayout& layout) {
  const LowLatencyGeometry& g = layout.geometry;
  const LowLatencyDeviceOffsets at = layout.offsets();
  const int64_t slots = int64_t{2} * g.ranks * g.max_tokens;
  const int64_t headers = slots * g.top_k * 8;
  const int64_t counts = g.experts_per_rank() + (layout.token_major ? 1 : 0);
  std::vector<Area> areas{{at.acks, int64_t{8} * g.ranks},
                          {at.progress, 8},
                          {at.calls, int64_t{2} * 2 * 8 * g.ranks},
                          {at.counts, int64_t{2} * 4 * g.ranks * counts},
                          {at.headers, headers}};
  if (layout.late) areas.push_back({at.late_headers, headers});
  areas.push_back({at.rows, slots * at.row_stride});
  areas.push_back({at.results, slots * at.row_stride});
  return areas;
}

std::string refusal_of(const LowLatencyGeometry& geometry) {
  try {
    cuda::check_device_geometry(geometry);
  } catch (const BadArgument& error) {
    return error.what();
  }
  return {};
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

// ---- areas --------------------------------------------------------------------------------------

TEST(device_areas_follow_each_other) {
  for (const LowLatencyDeviceLayout& layout : many_layouts()) {
    const std::vector<Area> areas = areas_of(layout);
    CHECK_EQ(areas.front().begin, 0);
    for (size_t i = 0; i < areas.size(); ++i) {
      CHECK_EQ(areas[i].begin % kAreaAlignment, 0);
      const int64_t end = areas[i].begin + areas[i].bytes;
      const int64_t next = i + 1 < areas.size() ? areas[i + 1].begin : layout.bytes();
      CHECK(end <= next);
      CHECK(next - end < kAreaAlignment);  // only alignment between them
    }
    CHECK_EQ(layout.bytes() % kAreaAlignment, 0);
  }
}

// The host fills all bytes from the headers on with the sentinel, so the words of calls must come
// before the headers.
TEST(device_words_that_begin_as_the_sentinel_come_last) {
  for (const LowLatencyDeviceLayout& layout : many_layouts()) {
    const LowLatencyDeviceOffsets at = layout.offsets();
    CHECK(at.acks < at.calls && at.calls < at.counts && at.counts < at.headers);
    CHECK(at.headers <= at.late_headers && at.late_headers <= at.rows && at.rows <= at.results);
    CHECK_EQ(at.end, layout.bytes());
  }
}

TEST(device_slots_hold_every_row) {
  for (int32_t hidden = 16; hidden <= 32768; hidden += hidden < 4096 ? 8 : 1000) {
    const LowLatencyDeviceLayout layout{{2, 2, 1, hidden, 1}, false};
    CHECK_EQ(layout.row_stride() % kAreaAlignment, 0);
    CHECK(layout.row_stride() >= bf16_row_bytes(hidden));
    // The fp8 values, then a unit of four scales for every 512 columns.
    if (hidden % 16 == 0) {
      CHECK(layout.row_stride() >= hidden + ceil_div(hidden, 512) * 16);
    }
  }
}

// The documented formula: 4 R M slot + 16 R M K, and 16 R M K more with late routing.
TEST(device_memory_matches_the_documentation) {
  for (const LowLatencyDeviceLayout& layout : many_layouts()) {
    const LowLatencyGeometry& g = layout.geometry;
    const int64_t slot = (int64_t{2} * g.hidden + 127) / 128 * 128;
    const int64_t pairs = int64_t{g.ranks} * g.max_tokens;
    const int64_t headers = 16 * pairs * g.top_k * (layout.late ? 2 : 1);
    const int64_t small = 128 + int64_t{40} * g.ranks + int64_t{8} * g.experts;
    const int64_t documented = 4 * pairs * slot + headers + small;
    CHECK(documented <= layout.bytes());
    CHECK(layout.bytes() < documented + 5 * kAreaAlignment);
  }
}

// num_rdma_bytes of DeepEP's programs is at least 4 E M (2 hidden + hidden / 32).
TEST(device_memory_fits_what_deep_ep_asks_for) {
  for (const LowLatencyDeviceLayout& layout : many_layouts()) {
    const LowLatencyGeometry& g = layout.geometry;
    if (g.hidden < 2048 || g.experts < 2 * g.ranks || g.max_tokens == 0) continue;
    const int64_t theirs =
        int64_t{4} * g.experts * g.max_tokens * (int64_t{2} * g.hidden + g.hidden / 32);
    CHECK(layout.bytes() <= theirs);
  }
}

TEST(device_sizes_do_not_overflow) {
  const LowLatencyGeometry geometry{32, 2048, 32, 65536, kMostDeviceTokens};
  const LowLatencyDeviceLayout layout{geometry, true};
  const int64_t pairs = int64_t{32} * kMostDeviceTokens;
  CHECK(layout.bytes() > pairs * (int64_t{4} * 2 * 65536 + int64_t{32} * 32));
  CHECK(TableLayout({32, 32, kMostDeviceTokens}).bytes() > pairs * 32 * 8);
}

// ---- words --------------------------------------------------------------------------------------

TEST(call_words_survive) {
  for (const uint32_t tokens : {0U, 1U, 128U, 0x800000U, uint32_t{kMostDeviceTokens}}) {
    for (const uint32_t flags : {0U, 1U, 2U, 3U, 4U, 5U}) {
      const bool refused = flags % 2 != 0;
      const auto rows = static_cast<RowKind>(flags / 2);
      for (const uint32_t signature : {0U, 1U, 0x8000U, 0xffffU}) {
        for (const uint32_t epoch : {0U, kFirstEpoch, 0xffffU, 0x10000U, 0xffffffffU}) {
          const CallWord sent{tokens, refused, rows, signature, epoch};
          const CallWord word = CallWord::decode(sent.encode());
          CHECK_EQ(word.tokens, tokens);
          CHECK_EQ(word.refused, refused);
          CHECK(word.rows == rows);
          CHECK_EQ(word.signature, signature);
          CHECK_EQ(word.epoch, epoch & 0xffffU);
        }
      }
    }
  }
}

// Neither fresh memory nor the last call but one, in the same half, may match this call.
TEST(call_words_name_their_call) {
  CHECK(CallWord::decode(0).epoch != kFirstEpoch);
  CHECK(CallWord::decode(0).epoch != kFirstEpoch + 1);
  for (const uint32_t epoch : {kFirstEpoch, 0xffffU, 0x10000U, 0xffffffffU}) {
    const uint64_t before = CallWord{7, false, RowKind::kBf16, 5, epoch - kParities}.encode();
    CHECK(CallWord::decode(before).epoch != (epoch & 0xffffU));
  }
}

TEST(count_words_survive_and_name_their_call) {
  for (const uint32_t count : {0U, 1U, 255U, 256U, uint32_t{kMostDeviceTokens}}) {
    for (const uint32_t tag : {0U, 1U, 0x80U, 0xffU}) {
      const CountWord word = CountWord::decode(CountWord{count, tag}.encode());
      CHECK_EQ(word.count, count);
      CHECK_EQ(word.tag, tag);
    }
  }
  CHECK(CountWord::decode(0).tag != CountWord::tag_of(kFirstEpoch));
  CHECK(CountWord::decode(0).tag != CountWord::tag_of(kFirstEpoch + 1));
  for (uint32_t epoch = kFirstEpoch; epoch < 2000; ++epoch) {
    CHECK(CountWord::tag_of(epoch) <= 0xffU);
    CHECK(CountWord::tag_of(epoch) != CountWord::tag_of(epoch + kParities));
  }
  CHECK(CountWord::tag_of(0xfffffffeU) != CountWord::tag_of(0));
}

TEST(headers_survive) {
  for (int32_t experts = 1; experts <= kMostDeviceExperts; ++experts) {
    const HeaderLayout header{experts};
    const auto last = static_cast<uint32_t>(experts - 1);
    const auto most =
        static_cast<uint32_t>(std::min<int64_t>(header.most_tokens(), kMostDeviceTokens) - 1);
    CHECK(last < header.elsewhere());  // no local expert equals "elsewhere"
    for (const uint32_t local : {0U, last / 2, last, header.elsewhere()}) {
      for (const uint32_t place : {0U, 1U, most}) {
        for (const uint32_t weight : {0U, 0x3f800000U, 0x7fc00000U, 0xffffffffU}) {
          const uint64_t word = header.encode(local, place, weight);
          CHECK_EQ(header.local(word), local);
          CHECK_EQ(header.place(word), place);
          CHECK_EQ(HeaderLayout::weight(word), weight);
        }
      }
    }
  }
}

// For a reader, 64 ones mean that the header has not arrived. It may see only half of a header, so
// the lower half alone is never all ones, for any weight, place and expert.
TEST(no_header_is_the_sentinel) {
  for (int32_t experts = 1; experts <= kMostDeviceExperts; ++experts) {
    const HeaderLayout header{experts};
    const auto most = static_cast<uint32_t>(header.most_tokens() - 1);
    for (const uint32_t place : {0U, most / 2, most}) {
      const uint64_t word = header.encode(header.elsewhere(), place, kSentinel);
      CHECK(word != ~uint64_t{0});
      CHECK(static_cast<uint32_t>(word) != kSentinel);
      CHECK_EQ(static_cast<uint32_t>(word) >> 31, 0U);
    }
  }
}

TEST(acknowledgements_survive) {
  for (const uint32_t dispatches : {0U, 1U, 0x7fffffffU, 0xffffffffU}) {
    for (const uint32_t combines : {0U, 1U, 0x80000000U, 0xffffffffU}) {
      const auto ack = Acknowledgement::decode(Acknowledgement{dispatches, combines}.encode());
      CHECK_EQ(ack.dispatches, dispatches);
      CHECK_EQ(ack.combines, combines);
    }
  }
  CHECK_EQ(Acknowledgement::decode(0).dispatches, 0U);  // fresh memory: no call received
  CHECK_EQ(Acknowledgement::decode(0).combines, 0U);
}

// Signatures of ranks that disagree usually differ in one field, by a little or by a factor.
TEST(signatures_differ_in_every_field) {
  std::vector<LowLatencySignature> some;
  for (const int32_t experts : {8, 64, 256, 512}) {
    for (const int32_t top_k : {1, 8, 22}) {
      for (const int32_t hidden : {1024, 2048, 7168}) {
        for (const int32_t weights : {0, 1, 2}) {
          some.push_back({experts, top_k, hidden, 128, 1, weights, {}});
        }
      }
    }
  }
  constexpr int32_t LowLatencySignature::* kFields[] = {
      &LowLatencySignature::experts,  &LowLatencySignature::top_k,
      &LowLatencySignature::hidden,   &LowLatencySignature::max_tokens,
      &LowLatencySignature::encoding, &LowLatencySignature::weights};
  for (const LowLatencySignature& ours : some) {
    CHECK(CallWord::signature_of(ours) <= 0xffffU);
    for (const auto field : kFields) {
      for (const int32_t other : {0, ours.*field + 1, ours.*field * 2, ours.*field + 128}) {
        if (other == ours.*field) continue;
        LowLatencySignature theirs = ours;
        theirs.*field = other;
        CHECK(CallWord::signature_of(ours) != CallWord::signature_of(theirs));
      }
    }
  }
}

// ---- the table ----------------------------------------------------------------------------------

TEST(table_parts_follow_each_other) {
  for (const int32_t ranks : {1, 2, 3, 32, 33, 1024}) {
    for (const int32_t top_k : {1, 7, 8, 32}) {
      for (const int32_t max_tokens : {0, 1, 7, 128, 4096}) {
        const TableLayout table{ranks, top_k, max_tokens};
        const int64_t pairs = int64_t{ranks} * max_tokens;
        const int64_t entry = sizeof(TableEntry);
        CHECK_EQ(table.pairs(), pairs);
        CHECK_EQ(table.fans_offset(), pairs * top_k * entry);
        CHECK_EQ(table.tokens_offset(), table.fans_offset() + pairs * 4);
        CHECK_EQ(table.ranks_offset(), table.tokens_offset() + int64_t{ranks} * 4);
        // One bit for each rank, or one word for each rank of the token.
        const int64_t words = ranks <= 32 ? 1 : top_k;
        CHECK_EQ(table.bytes(), table.ranks_offset() + max_tokens * words * 4);
        CHECK_EQ(table.bytes() % 4, 0);  // the tensor's dtype is int32
      }
    }
  }
}

// ---- bounds -------------------------------------------------------------------------------------

TEST(geometries_that_the_kernels_serve) {
  CHECK_EQ(refusal_of({4, 256, 8, 7168, 128}), "");
  CHECK_EQ(refusal_of({1, 1, 1, 16, 1}), "");
  CHECK_EQ(refusal_of({kMostRanks, kMostDeviceExperts, 32, 128, 128}), "");
  // One local expert: two billion rows are more than a call's tokens.
  CHECK_EQ(refusal_of({1, 1, 1, 16, kMostDeviceTokens}), "");
}

TEST(refused_geometries_name_their_bound) {
  const std::string ranks = refusal_of({1025, 1025, 8, 1024, 128});
  CHECK(has(ranks, "ranks is 1025, but must be at most 1024") && has(ranks, "lanes of a warp"));
  const std::string experts = refusal_of({4, 2052, 8, 1024, 128});
  CHECK(has(experts, "num_experts is 2052, but must be at most 2048"));
  CHECK(has(experts, "shared memory"));
  const std::string most = refusal_of({1, 1, 1, 16, kMostDeviceTokens + 1});
  CHECK(has(most, "max_tokens is 16777216, but must be at most 16777215"));
}

TEST(the_most_tokens_depend_on_the_local_experts) {
  // 2048 local experts take 12 of 31 bits of a header.
  CHECK_EQ(refusal_of({1, 2048, 8, 1024, 1 << 19}), "");
  const std::string more = refusal_of({1, 2048, 8, 1024, (1 << 19) + 1});
  CHECK(has(more, "max_tokens is 524289, but must be at most 524288"));
  CHECK(has(more, "share a word"));
}

TEST(rows_are_counted_in_32_bits) {
  // 64 experts, each with room for 32 ranks: 2^31 rows at 2^20 tokens, one too many.
  CHECK_EQ(refusal_of({32, 2048, 8, 1024, (1 << 20) - 1}), "");
  const std::string rows = refusal_of({32, 2048, 8, 1024, 1 << 20});
  CHECK(has(rows, "rows of all local experts is 2147483648"));
  CHECK(has(rows, "at most 2147483647"));
}

TEST(grids_need_a_receiver_for_each_rank) {
  const cuda::LowLatencyPlace place{};
  const LowLatencyGeometry geometry{2, 8, 2, 128, 16};
  for (const auto& [ctas, senders] : {std::tuple{3, 1}, {132, 20}, {kMostCtas, kMostCtas - 2}}) {
    static_cast<void>(cuda::LowLatency(place, geometry, false, {ctas, senders}));
  }
  for (const auto& [ctas, senders] :
       {std::tuple{132, 0}, {132, 131}, {2, 1}, {1, 1}, {3, -1}, {kMostCtas + 1, 20}}) {
    CHECK_THROWS(cuda::LowLatency(place, geometry, false, {ctas, senders}), BadArgument);
  }
}

// Also with more ranks than a GPU has SMs.
TEST(grids_for_many_ranks_need_a_receiver) {
  const cuda::LowLatencyPlace place{};
  const LowLatencyGeometry geometry{1024, 1024, 2, 128, 16};
  for (const auto& [ctas, senders] : {std::tuple{2, 1}, {132, 131}}) {
    static_cast<void>(cuda::LowLatency(place, geometry, false, {ctas, senders}));
  }
  CHECK_THROWS(cuda::LowLatency(place, geometry, false, {132, 132}), BadArgument);
}

// The host relies on this order of the state: counters first, then masks, the failure last.
TEST(state_parts_are_where_the_host_looks) {
  CHECK_EQ(offsetof(LowLatencyState, masked), sizeof(LowLatencyState::epochs));
  CHECK_EQ(offsetof(LowLatencyState, peers) % 8, size_t{0});
  CHECK_EQ(offsetof(LowLatencyState, failed) + 4, sizeof(LowLatencyState));
}

TEST(addresses_of_many_ranks_are_in_device_memory) {
  cuda::LowLatencyPlace place{};
  place.state = 1 << 20;
  for (size_t peer = 0; peer < place.peers.size(); ++peer) place.peers[peer] = 4096 * (peer + 1);
  const auto table_of = [&](int32_t ranks) {
    const LowLatencyGeometry geometry{ranks, ranks, 2, 128, 16};
    return cuda::LowLatency(place, geometry, false, {132, 20}).dispatch_arguments(0, 0).call.peers;
  };
  CHECK(table_of(32).all == nullptr);
  CHECK_EQ(reinterpret_cast<uintptr_t>(table_of(32).few[31]), uintptr_t{4096 * 32});
  const auto* all = reinterpret_cast<const unsigned char*>(table_of(33).all);
  CHECK_EQ(reinterpret_cast<uintptr_t>(all), place.state + offsetof(LowLatencyState, peers));
}

// ---- distribution of rows over CTAs -------------------------------------------------------------

// Every (source, token) has exactly one CTA and turn.
TEST(ctas_share_all_rows) {
  for (const int32_t ranks : {1, 2, 3, 4, 7, 8, 32, 33, 72, 256, 1024}) {
    for (const int32_t ctas : {1, 7, 32, 33, 64, 112, 131, 132, kMostCtas}) {
      if (ctas < least_receivers(ranks)) continue;
      const int32_t tokens = 3 * ctas / ranks + 5;
      const int32_t rows = ranks * tokens;
      std::vector<int> times(static_cast<size_t>(rows));
      for (int32_t cta = 0; cta < ctas; ++cta) {
        for (int32_t turn = 0; cta + turn * ctas < rows; ++turn) {
          const SourceToken pair = pair_of(cta, turn, ctas, ranks);
          CHECK(pair.source >= 0 && pair.source < ranks);
          CHECK(pair.token >= 0 && pair.token < tokens);
          const int32_t row = pair.token * ranks + pair.source;
          ++times[static_cast<size_t>(row)];
        }
      }
      CHECK_EQ(std::count(times.begin(), times.end(), 1), rows);
    }
  }
}

// No CTA waits for one rank alone, unless the number of CTAs plus one is a multiple of the ranks:
// then the shift of a turn and the shift of a row cancel out.
TEST(ctas_change_their_source) {
  for (const int32_t ranks : {2, 3, 4, 8}) {
    for (const int32_t ctas : {64, 112, 131, 132}) {
      if ((ctas + 1) % ranks == 0) continue;
      for (int32_t cta = 0; cta < ctas; ++cta) {
        std::vector<bool> sources(static_cast<size_t>(ranks));
        for (int32_t turn = 0; turn < 4 * ranks; ++turn) {
          sources[static_cast<size_t>(pair_of(cta, turn, ctas, ranks).source)] = true;
        }
        CHECK(std::count(sources.begin(), sources.end(), true) > 1);
      }
    }
  }
}

// ---- arguments of both kernels ------------------------------------------------------------------

TEST(arguments_carry_the_call) {
  cuda::LowLatencyPlace place{};
  place.rank = 1;
  place.peers = {4096, 8192};
  place.timeout_ns = 5'000'000'000;
  place.mask_late = true;
  const LowLatencyGeometry geometry{2, 8, 2, 128, 16};
  const cuda::LowLatency calls(place, geometry, true, {132, 20});
  const DispatchArgs dispatch = calls.dispatch_arguments(2, 0);
  const CombineArgs combine = calls.combine_arguments(false, 2);
  CHECK(calls.combine_arguments(true, 2).call.signature != combine.call.signature);
  for (const uint32_t epoch : {0U, 1U << 30, 1U << 31}) {
    CHECK(call_id(CallKind::kDispatch, epoch) != 0);
    CHECK(call_id(CallKind::kCombine, epoch) != 0);
  }
  for (const CallArgs* call : {&dispatch.call, &combine.call}) {
    CHECK_EQ(call->rank, 1);
    CHECK_EQ(call->max_tokens, 16);
    CHECK_EQ(call->senders, 20);
    CHECK_EQ(call->mask_late, 1);
    CHECK_EQ(call->refused, 0);
    CHECK_EQ(call->phases, uint32_t{kWhole});
    CHECK_EQ(call->timeout_ns, 5'000'000'000);
    CHECK_EQ(reinterpret_cast<uintptr_t>(call->peers.few[1]), 8192U);
    const LowLatencyDeviceLayout layout{geometry, true};
    CHECK_EQ(call->at.end, layout.bytes());
    CHECK(call->at.rows > call->at.late_headers);
  }
  CHECK_EQ(dispatch.call.signature, CallWord::signature_of({8, 2, 128, 16, 2, 0, {}}));
  CHECK_EQ(combine.call.signature, CallWord::signature_of({8, 2, 128, 16, 0, 2, {}}));
}

// --- The kernel that a rank is in -----------------------------------------------------------

namespace {

// The calls that a rank has begun and received.
struct Counts {
  uint32_t sends[2];
  uint32_t received[2];
};

Progress progress_of(CallKind kind, uint32_t phases, const Counts& counts, bool headers = false) {
  return Progress::of(kind, phases, headers)
      .with_counts(0, counts.sends[0], counts.received[0])
      .with_counts(1, counts.sends[1], counts.received[1]);
}

// The counts of a rank in the kernel of its next call after `calls` whole dispatches and combines.
// A combine's dispatch has been received.
Counts counts_in(CallKind kind, uint32_t calls) {
  if (kind == CallKind::kDispatch) return {{calls + 1, calls}, {calls, calls}};
  return {{calls + 1, calls + 1}, {calls + 1, calls}};
}

Progress whole(CallKind kind, uint32_t calls) {
  return progress_of(kind, kWhole, counts_in(kind, calls));
}

}  // namespace

TEST(low_latency_device_progress_survives_its_encoding) {
  for (const uint32_t calls : {0u, 1u, 0x7ffeu, 0x7fffu}) {
    for (const CallKind kind : {CallKind::kDispatch, CallKind::kCombine}) {
      for (const uint32_t phases : {0u, 1u, 2u, 3u}) {
        const Progress one = progress_of(kind, phases, {{calls, 5}, {6, calls}}, phases == 1);
        CHECK_EQ(one.kind(), static_cast<int>(kind));
        CHECK_EQ(one.needs_headers(), phases == 1);
        CHECK_EQ(one.does(kSend), (phases & 1) != 0);
        CHECK_EQ(one.does(kReceive), (phases & 2) != 0);
        CHECK_EQ(one.sends(0), calls);
        CHECK_EQ(one.sends(1), 5u);
        CHECK_EQ(one.received(0), 6u);
        CHECK_EQ(one.received(1), calls);
      }
    }
  }
}

TEST(low_latency_device_kernels_of_other_calls_need_each_other) {
  for (const uint32_t calls : {0u, 1u, 100u, 0x7ffdu, 0x7ffeu, 0x7fffu, 0x8000u, 0x12345u}) {
    const Progress combine = whole(CallKind::kCombine, calls);
    // A rank that skips the combine.
    const Progress skipped =
        progress_of(CallKind::kDispatch, kWhole, {{calls + 2, calls}, {calls + 1, calls}});
    CHECK(skipped.needs(combine));
    CHECK(combine.needs(skipped));
    // A rank that is one or two calls behind needs no rank that is ahead.
    const Progress ahead = whole(CallKind::kDispatch, calls + 1);
    const Progress behind = whole(CallKind::kDispatch, calls);
    CHECK(ahead.needs(combine));
    CHECK(ahead.needs(behind));
    CHECK(combine.needs(behind));
    CHECK(!combine.needs(ahead));
    CHECK(!behind.needs(ahead));
    CHECK(!behind.needs(combine));
    CHECK(!ahead.needs(ahead));
    CHECK(!combine.needs(combine));
  }
  CHECK(!Progress{0}.needs(whole(CallKind::kDispatch, 3)));
}

TEST(low_latency_device_a_send_alone_needs_acknowledgements_only) {
  const Progress before = whole(CallKind::kDispatch, 4);
  // The sixth dispatch, which needs the fourth one received.
  const Progress sends = progress_of(CallKind::kDispatch, kSend, {{6, 4}, {4, 4}});
  CHECK(!sends.needs(before));
  CHECK(sends.needs(progress_of(CallKind::kDispatch, kWhole, {{5, 4}, {3, 4}})));
  // With late weights the send half of a combine also waits for headers.
  const Counts counts = counts_in(CallKind::kCombine, 4);
  CHECK(!progress_of(CallKind::kCombine, kSend, counts).needs(before));
  CHECK(progress_of(CallKind::kCombine, kSend, counts, true).needs(before));
}
