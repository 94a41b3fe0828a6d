// All ranks in one process with their low-latency objects, and functions that run the halves of a
// call on one rank.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "host/low_latency.h"
#include "links.hpp"
#include "low_latency_call.hpp"
#include "ranks.hpp"

namespace fanfold {

// All ranks in one process with their low-latency objects.
struct World {
  explicit World(Group group, uint32_t epoch = 0)
      : memory(std::move(group)), links(separate(memory)), none_absent(memory.size(), false) {
    const LowLatencySignals signals{static_cast<int32_t>(memory.size())};
    for (const auto& own : memory) {
      for (int64_t offset = 0; offset < signals.bytes(); offset += 8) {
        own->peer(own->rank()).signal_quietly(offset, Signal{epoch, 0});
      }
      modes.push_back(std::make_unique<LowLatency>(*own, 0, own->bytes(), epoch));
    }
  }

  LowLatency& operator[](int32_t rank) const { return *modes[static_cast<size_t>(rank)]; }
  int32_t ranks() const { return static_cast<int32_t>(modes.size()); }

  Group memory;
  Links links;
  std::vector<bool> none_absent;
  std::vector<std::unique_ptr<LowLatency>> modes;
};

inline int64_t bytes_for(const LowLatencyGeometry& geometry) {
  return LowLatencyLayout{geometry}.bytes();
}

inline World world_for(const LowLatencyGeometry& geometry, uint32_t epoch = 0) {
  SymmetricOptions options = options_for(geometry.ranks, bytes_for(geometry));
  options.hosts = hosts_for(geometry.ranks, hosts_of_worlds);
  return World(SymmetricMemory::in_process(options), epoch);
}

// Yields a random number of times, so that the ranks run in every order.
inline void stall(Random& random) {
  if (random.one_in(2)) return;
  for (int32_t yields = random.between(0, 20); yields > 0; --yields) std::this_thread::yield();
}

// The four halves of a call. The send halves free their inputs before they return.
inline uint32_t send(LowLatency& mode, const Call& call, int32_t rank) {
  const auto own = std::make_unique<Batch>(call.batch(rank));
  const bool weighted = call.options().weights == Weights::kWithDispatch;
  return mode.dispatch_send(
      call.geometry(),
      LowLatencyTokens{.x = own->x,
                       .topk_idx = own->topk_idx,
                       .topk_weights = weighted ? Array<const float>(own->topk_weights) : nullptr,
                       .global_scale = nullptr,
                       .weighted = weighted,
                       .tokens = own->tokens,
                       .encoding = call.options().encoding});
}

inline Arrived receive(LowLatency& mode, const Call& call, uint32_t epoch) {
  Arrived arrived(call);
  mode.dispatch_receive(epoch, arrived.view());
  return arrived;
}

inline uint32_t answer(LowLatency& mode, const Call& call, int32_t rank, const Arrived& arrived,
                       const std::vector<bool>& absent) {
  const Answers answers(call, rank, absent);
  const auto own = std::make_unique<Batch>(call.batch(rank));
  const LowLatencyTokens late{.x = nullptr,
                              .topk_idx = own->topk_idx,
                              .topk_weights = own->topk_weights,
                              .global_scale = nullptr,
                              .weighted = true,
                              .tokens = own->tokens,
                              .encoding = RowEncoding::kBf16};
  const Weights weights = call.options().weights;
  return mode.combine_send(
      call.geometry(),
      LowLatencyOutputs{.y = answers.y,
                        .expert_stride = answers.expert_stride,
                        .row_stride = answers.row_stride,
                        .ranges = arrived.ranges,
                        .source_counts = weights == Weights::kWithCombine
                                             ? nullptr
                                             : Array<const int32_t>(arrived.source_counts),
                        .experts = arrived.experts,
                        .weights = weights == Weights::kWithDispatch
                                       ? Array<const float>(arrived.weights)
                                       : nullptr,
                        .late_tokens = weights == Weights::kWithCombine ? &late : nullptr,
                        .logfmt = call.options().logfmt});
}

inline std::vector<uint16_t> collect(LowLatency& mode, const Call& call, int32_t rank,
                                     uint32_t epoch) {
  const Batch& own = call.batch(rank);
  std::vector<uint16_t> out(own.x.size(), 0xffff);
  std::vector<int64_t> wait_ns(static_cast<size_t>(call.geometry().ranks), 0);
  mode.combine_receive(
      epoch, LowLatencyResult{
                 .out = out, .topk_idx = own.topk_idx, .tokens = own.tokens, .wait_ns = wait_ns});
  return out;
}

// Runs and checks a whole call.
inline void run_call(LowLatency& mode, const Call& call, int32_t rank,
                     const std::vector<bool>& absent, Random& jitter) {
  stall(jitter);
  const uint32_t dispatched = send(mode, call, rank);
  stall(jitter);
  const Arrived arrived = receive(mode, call, dispatched);
  check_arrived(call, rank, arrived, absent);
  stall(jitter);
  const uint32_t combined = answer(mode, call, rank, arrived, absent);
  stall(jitter);
  check_result(call, rank, collect(mode, call, rank, combined), absent);
}

inline constexpr int32_t kMostHidden = 272;

inline LowLatencyGeometry largest(int32_t ranks) { return {ranks, 5 * ranks, 6, kMostHidden, 9}; }

inline CallOptions random_options(Random& random, int32_t ranks) {
  CallOptions options{};
  options.encoding = static_cast<RowEncoding>(random.between(0, 2));
  const int32_t step = options.encoding == RowEncoding::kBf16 ? 8 : 16;
  options.geometry = {ranks, ranks * random.between(1, 5), random.between(1, 6),
                      step * random.between(16 / step, kMostHidden / step), random.between(0, 9)};
  const bool packed = options.encoding == RowEncoding::kFp8PowerOfTwo && random.one_in(2);
  options.scale_format = packed ? ScaleFormat::kUe8m0 : ScaleFormat::kFloat32;
  options.weights = static_cast<Weights>(random.between(0, 2));
  options.logfmt = random.one_in(4);
  return options;
}

// Calls of one small geometry, so that thousands of them share the same few slots.
inline CallOptions small_options(int32_t ranks, uint64_t number) {
  CallOptions options{};
  options.geometry = {ranks, 2 * ranks, 2, 16, 3};
  options.weights = number % 2 == 0 ? Weights::kWithDispatch : Weights::kWithCombine;
  return options;
}

}  // namespace fanfold
