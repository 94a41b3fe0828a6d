#include "cuda/high_throughput.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "base/error.h"

namespace fanfold::cuda {
namespace {

void check_within(const char* name, int64_t value, int64_t least, int64_t most, const char* why) {
  if (value >= least && value <= most) return;
  throw BadArgument(name, std::to_string(value),
                    "from " + std::to_string(least) + " to " + std::to_string(most) +
                        " for high throughput on GPUs (" + why + ")");
}

// Slots in the room of `rings` rings.
int32_t slots_of(int32_t slot_bytes, int64_t ring_bytes, int32_t most, int32_t rings = 1) {
  const int64_t fit = ring_bytes * rings / (int64_t{slot_bytes} * kBatchTokens);
  if (fit < kLeastRingSlots) {
    const int64_t least = int64_t{slot_bytes} * kBatchTokens * kLeastRingSlots;
    throw BadArgument("ring_bytes", std::to_string(ring_bytes),
                      "at least " + std::to_string((least + rings - 1) / rings) +
                          " for these rows (FANFOLD_RING_BYTES)");
  }
  return static_cast<int32_t>(std::min<int64_t>(fit, most));
}

}  // namespace

HighThroughputOffsets high_throughput_offsets(int32_t ranks, int64_t ring_bytes) {
  check_within("ranks", ranks, 1, kMostRanks, "the lanes of a warp hold their sets");
  return HighThroughputDeviceLayout{ranks, align_up(ring_bytes, kAreaAlignment)}.offsets();
}

HighThroughput::HighThroughput(const HighThroughputPlace& place)
    : place_(place), offsets_(high_throughput_offsets(place.ranks, place.ring_bytes)) {
  check_within("rank", place.rank, 0, place.ranks - 1, "the ranks of the group");
  constexpr int64_t kShortBatches = kMostShortTokens / kShortBatchTokens;
  constexpr int64_t kTurns = (int64_t{kMostTurns} * kLeastRingSlots - kShortBatches) * kBatchTokens;
  check_within("max_tokens", place.max_tokens, 0,
               std::min<int64_t>(ArrivalWord::kMostTokens, kTurns - kBatchTokens),
               "an arrival carries them, and a batch's word the turns of a ring");
  // Bounds token-major rows, at most one for each token of each rank. check_shape bounds
  // expert-major rows.
  check_within("ranks * max_tokens", int64_t{place.ranks} * place.max_tokens, 0,
               (int64_t{1} << PlaceWord::kRowBits) - 1, "a row's number has 26 bits");
}

int32_t HighThroughput::slots(const HighThroughputShape& shape) const {
  switch (shape.phase) {
    case HighThroughputPhase::kPlan:
      return 0;
    case HighThroughputPhase::kDispatch:
      return slots_of(shape.slot_bytes, place_.ring_bytes,
                      shape.in_place != 0 && shape.expert_major != 0 ? kMostDestinationSlots
                                                                     : kMostDispatchSlots,
                      std::max(shape.kept_rings, 1));
    case HighThroughputPhase::kCombine:
      check_within("slices", shape.slices, 1, kMostSlices, "words of a slot");
      return slots_of(shape.slot_bytes, place_.ring_bytes, kRingWords / shape.slices);
  }
  return 0;
}

void HighThroughput::check_shape(const HighThroughputShape& shape) const {
  check_within("num_experts", shape.experts, 1, HighThroughputDeviceLayout::kMostCounted,
               "their counts are in shared memory");
  if (shape.experts % place_.ranks != 0) {
    throw BadArgument("num_experts", std::to_string(shape.experts),
                      "divisible by the " + std::to_string(place_.ranks) + " ranks");
  }
  if (shape.phase != HighThroughputPhase::kPlan) return;
  const int bits = PlaceWord::row_bits(place_.ranks);
  const int64_t local = shape.experts / place_.ranks;
  const int64_t entries = std::min<int64_t>(shape.top_k, local);
  const int64_t rows = int64_t{place_.ranks} * place_.max_tokens * entries;
  const std::string why = "a row's number has " + std::to_string(bits) +
                          " bits with so many ranks: lower max_tokens or expert_alignment";
  check_within("rows that one rank may receive", rows + local * (shape.alignment - 1), 0,
               (int64_t{1} << bits) - 1, why.c_str());
}

void HighThroughput::check_grid(const HighThroughputGrid& grid) const {
  const int32_t receivers = place_.ranks > 1 ? 1 : 0;
  check_within("ctas", grid.ctas, 1 + receivers, kMostHighThroughputCtas, "SMs of a kernel");
  check_within("senders", grid.senders, 1, grid.ctas - receivers,
               "the CTAs, of which one receives at least");
}

uint32_t HighThroughput::signature_of(const HighThroughputShape& shape) const {
  uint32_t hash = 2166136261u;
  for (const int32_t value :
       {static_cast<int32_t>(shape.phase), shape.experts, shape.top_k, shape.row_bytes,
        shape.scale_words, shape.slot_bytes, slots(shape), shape.expert_major, shape.in_place,
        shape.kept_rings, shape.slices, shape.variant, shape.alignment, place_.max_tokens}) {
    hash = (hash ^ static_cast<uint32_t>(value)) * 16777619u;
  }
  return (hash >> 16) ^ (hash & 0xffffu);
}

HighThroughputArgs HighThroughput::call_arguments(const HighThroughputShape& shape,
                                                  const HighThroughputGrid& grid) const {
  check_shape(shape);
  check_grid(grid);
  HighThroughputArgs call{};
  call.peers = peer_table(place_.peers.data(), place_.ranks,
                          place_.state + offsetof(HighThroughputState, peers));
  call.at = offsets_;
  call.state = reinterpret_cast<HighThroughputState*>(place_.state);
  call.reports = reinterpret_cast<Report*>(place_.reports);
  call.timeout_ns = place_.timeout_ns;
  call.rank = place_.rank;
  call.slots = slots(shape);
  call.senders = grid.senders;
  call.signature = signature_of(shape);
  return call;
}

PlanArgs HighThroughput::plan_arguments(const HighThroughputShape& shape,
                                        const HighThroughputGrid& grid) const {
  PlanArgs args{};
  args.call = call_arguments(shape, grid);
  args.alignment = shape.alignment;
  return args;
}

HighThroughputDispatchArgs HighThroughput::dispatch_arguments(
    const HighThroughputShape& shape, const HighThroughputGrid& grid) const {
  HighThroughputDispatchArgs args{};
  args.call = call_arguments(shape, grid);
  args.zeroes_padding = 1;
  return args;
}

HighThroughputCombineArgs HighThroughput::combine_arguments(const HighThroughputShape& shape,
                                                            const HighThroughputGrid& grid) const {
  HighThroughputCombineArgs args{};
  args.call = call_arguments(shape, grid);
  return args;
}

}  // namespace fanfold::cuda
