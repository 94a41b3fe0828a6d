// One low-latency dispatch and combine of all ranks: their inputs, and the expected outputs,
// computed from the contract alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.hpp"
#include "host/low_latency.h"
#include "ranks.hpp"
#include "reference.hpp"

namespace fanfold {

enum class Weights { kNone, kWithDispatch, kWithCombine };

struct CallOptions {
  LowLatencyGeometry geometry;
  RowEncoding encoding = RowEncoding::kBf16;
  ScaleFormat scale_format = ScaleFormat::kFloat32;
  Weights weights = Weights::kWithDispatch;
  bool logfmt = false;
};

// The input of one rank.
struct Batch {
  int32_t tokens;
  std::vector<uint16_t> x;
  std::vector<int64_t> topk_idx;
  std::vector<float> topk_weights;
};

// A row that an expert must receive.
struct ExpectedRow {
  int32_t source;
  int32_t token;
  float weight;
};

inline uint16_t random_bf16(Random& random) {
  // Magnitudes from 2^-6 to 4, so that sums differ in every order of adding.
  const auto exponent = static_cast<uint32_t>(random.between(121, 128));
  return static_cast<uint16_t>((random.next() & 0x807f) | exponent << 7);
}

// Fills in the routing of one token. Over all styles it covers every allowed shape, including
// duplicates and -1.
inline void route(Random& random, int32_t experts, int32_t style, int64_t* ids, int32_t top_k) {
  for (int32_t k = 0; k < top_k; ++k) {
    switch (style) {
      case 0:
        ids[k] = random.between(0, experts - 1);
        break;
      case 1:
        ids[k] = random.between(-1, std::min(experts, 4) - 1);
        break;
      case 2:
        ids[k] = experts - 1;
        break;
      case 3:
        ids[k] = -1;
        break;
      default:
        ids[k] = random.one_in(3) ? -1 : random.between(0, experts - 1);
    }
  }
}

class Call {
 public:
  Call(uint64_t seed, const CallOptions& options) : options_(options), seed_(seed) {
    Random random(seed);
    const LowLatencyGeometry& g = geometry();
    for (int32_t rank = 0; rank < g.ranks; ++rank) {
      Batch batch;
      batch.tokens = random.one_in(4) ? 0 : random.between(0, g.max_tokens);
      if (random.one_in(4)) batch.tokens = g.max_tokens;
      const auto tokens = static_cast<size_t>(batch.tokens);
      batch.x.resize(tokens * static_cast<size_t>(g.hidden));
      std::generate(batch.x.begin(), batch.x.end(), [&] { return random_bf16(random); });
      batch.topk_idx.resize(tokens * static_cast<size_t>(g.top_k));
      batch.topk_weights.resize(batch.topk_idx.size());
      std::generate(batch.topk_weights.begin(), batch.topk_weights.end(),
                    [&] { return random.real(-1.0f, 1.0f); });
      const int32_t style = random.between(0, 6);
      for (size_t token = 0; token < tokens; ++token) {
        route(random, g.experts, style, &batch.topk_idx[token * static_cast<size_t>(g.top_k)],
              g.top_k);
      }
      batches_.push_back(std::move(batch));
    }
  }

  const LowLatencyGeometry& geometry() const { return options_.geometry; }
  const CallOptions& options() const { return options_; }
  const Batch& batch(int32_t rank) const { return batches_[static_cast<size_t>(rank)]; }
  const int64_t* ids(int32_t rank, int64_t token) const {
    return batch(rank).topk_idx.data() + token * geometry().top_k;
  }
  const uint16_t* x(int32_t rank, int64_t token) const {
    return batch(rank).x.data() + token * geometry().hidden;
  }

  // Computes the weight of `token` for `expert`: the sum, in order, over all top-k entries that
  // name the expert. Returns false if no entry names it.
  bool weight_of(int32_t rank, int64_t token, int64_t expert, bool weighted, float* weight) const {
    const float* weights = batch(rank).topk_weights.data() + token * geometry().top_k;
    bool found = false;
    for (int32_t k = 0; k < geometry().top_k; ++k) {
      if (ids(rank, token)[k] != expert) continue;
      const float here = weighted ? weights[k] : 1.0f;
      *weight = found && weighted ? reference::plus(*weight, here) : here;
      found = true;
    }
    return found;
  }

  // The rows of one expert, by source rank, then source token.
  std::vector<ExpectedRow> rows_of(int64_t expert, const std::vector<bool>& absent) const {
    std::vector<ExpectedRow> rows;
    for (int32_t source = 0; source < geometry().ranks; ++source) {
      if (absent[static_cast<size_t>(source)]) continue;
      for (int32_t token = 0; token < batch(source).tokens; ++token) {
        float weight = 0;
        const bool weighted = options_.weights == Weights::kWithDispatch;
        if (!weight_of(source, token, expert, weighted, &weight)) continue;
        rows.push_back({source, token, weight});
      }
    }
    return rows;
  }

  // The output of `expert` for a row: a value that differs for every argument.
  uint16_t answer(int64_t expert, int32_t source, int64_t token, int64_t column) const {
    Random random(seed_ ^
                  static_cast<uint64_t>(((expert * 64 + source) << 40) ^ (token << 20) ^ column));
    return random_bf16(random);
  }

  // The sum over one rank's experts for one token and column, before rounding.
  bool partial_sum(int32_t expert_rank, int32_t source, int64_t token, int64_t column,
                   float* sum) const {
    const LowLatencyGeometry& g = geometry();
    const int64_t first = int64_t{expert_rank} * g.experts_per_rank();
    *sum = 0.0f;
    bool any = false;
    const int64_t* named = ids(source, token);
    for (int32_t k = 0; k < g.top_k; ++k) {
      const int64_t expert = named[k];
      if (expert < first || expert >= first + g.experts_per_rank()) continue;
      if (std::find(named, named + k, expert) != named + k) continue;
      float weight = 0;
      weight_of(source, token, expert, options_.weights != Weights::kNone, &weight);
      const float y = reference::bf16_value(answer(expert, source, token, column));
      *sum = reference::plus(*sum, reference::times(weight, y));
      any = true;
    }
    return any;
  }

 private:
  CallOptions options_;
  uint64_t seed_;
  std::vector<Batch> batches_;
};

// The outputs of one rank's dispatch, filled with other values at first.
struct Arrived {
  explicit Arrived(const Call& call) : options(call.options()) {
    const LowLatencyGeometry& g = call.geometry();
    const auto size = [](int64_t n) { return static_cast<size_t>(n); };
    const int64_t places = g.experts_per_rank() * g.expert_capacity();
    const int64_t entries = g.expert_capacity() * g.top_k;
    rows.assign(size(places * g.hidden * 2), std::byte{0xee});
    scales.assign(size(places * blocks_of(g.hidden) * 4), std::byte{0xee});
    counts.assign(size(g.experts_per_rank()), -1);
    source_tokens.assign(size(places), -1);
    ranges.assign(size(int64_t{g.experts_per_rank()} * g.ranks), -1);
    row_weights.assign(size(places), -9.0f);
    source_counts.assign(size(g.ranks), -1);
    experts.assign(size(entries), -9);
    weights.assign(size(entries), -9.0f);
    expert_totals.assign(size(g.experts_per_rank()), 1000);
    wait_ns.assign(size(g.ranks), 0);
  }

  LowLatencyReceived view() {
    const bool weighted = options.weights == Weights::kWithDispatch;
    return LowLatencyReceived{
        .rows = rows,
        .scales = options.encoding == RowEncoding::kBf16 ? nullptr : Array<std::byte>(scales),
        .counts = counts,
        .source_tokens = source_tokens,
        .ranges = ranges,
        .row_weights = weighted ? Array<float>(row_weights) : nullptr,
        .source_counts = source_counts,
        .experts = experts,
        .weights = weighted ? Array<float>(weights) : nullptr,
        .expert_totals = expert_totals,
        .wait_ns = wait_ns,
        .encoding = options.encoding,
        .scale_format = options.scale_format};
  }

  CallOptions options;
  std::vector<std::byte> rows;
  std::vector<std::byte> scales;
  std::vector<int32_t> counts;
  std::vector<int32_t> source_tokens;
  std::vector<int64_t> ranges;
  std::vector<float> row_weights;
  std::vector<int32_t> source_counts;
  std::vector<int16_t> experts;
  std::vector<float> weights;
  std::vector<int32_t> expert_totals;
  std::vector<int64_t> wait_ns;
};

// Checks one received row: its values, and its scales, which are adjacent to those of the expert's
// next row.
inline void check_row(const Call& call, const Arrived& arrived, const ExpectedRow& row, int64_t e,
                      int64_t place) {
  const LowLatencyGeometry& g = call.geometry();
  const int64_t capacity = g.expert_capacity();
  const uint16_t* x = call.x(row.source, row.token);
  const auto hidden = static_cast<size_t>(g.hidden);
  if (arrived.options.encoding == RowEncoding::kBf16) {
    const size_t offset = static_cast<size_t>(e * capacity + place) * hidden * 2;
    CHECK(std::memcmp(arrived.rows.data() + offset, x, hidden * 2) == 0);
    return;
  }
  const bool power_of_two = arrived.options.encoding == RowEncoding::kFp8PowerOfTwo;
  const reference::Fp8Row expected = reference::quantize(x, hidden, power_of_two);
  const size_t offset = static_cast<size_t>(e * capacity + place) * hidden;
  CHECK(std::memcmp(arrived.rows.data() + offset, expected.values.data(), hidden) == 0);
  const bool packed = arrived.options.scale_format == ScaleFormat::kUe8m0;
  const auto blocks = static_cast<int64_t>(expected.scales.size());
  const int64_t words = packed ? (blocks + 3) / 4 : blocks;
  for (int64_t block = 0; block < (packed ? words * 4 : blocks); ++block) {
    const int64_t word = packed ? block / 4 : block;
    const std::byte* at = arrived.scales.data() + ((e * words + word) * capacity + place) * 4;
    if (packed) {  // 2^(byte - 127); bytes beyond the last block are zero
      const int byte = std::to_integer<int>(at[block % 4]);
      const bool real = block < blocks;
      CHECK_EQ(byte, real ? std::ilogb(expected.scales[static_cast<size_t>(block)]) + 127 : 0);
    } else {
      float scale = 0;
      std::memcpy(&scale, at, sizeof scale);
      CHECK_EQ(scale, expected.scales[static_cast<size_t>(block)]);
    }
  }
}

// Checks all outputs of a dispatch on `rank`. The absent ranks must not have contributed.
inline void check_arrived(const Call& call, int32_t rank, const Arrived& arrived,
                          const std::vector<bool>& absent) {
  const LowLatencyGeometry& g = call.geometry();
  for (int32_t source = 0; source < g.ranks; ++source) {
    const bool gone = absent[static_cast<size_t>(source)];
    CHECK_EQ(arrived.source_counts[static_cast<size_t>(source)],
             gone ? 0 : call.batch(source).tokens);
  }
  for (int32_t e = 0; e < g.experts_per_rank(); ++e) {
    const std::vector<ExpectedRow> rows =
        call.rows_of(int64_t{rank} * g.experts_per_rank() + e, absent);
    CHECK_EQ(arrived.counts[static_cast<size_t>(e)], rows.size());
    CHECK_EQ(arrived.expert_totals[static_cast<size_t>(e)], 1000 + rows.size());
    std::vector<int64_t> ranges(static_cast<size_t>(g.ranks), 0);
    for (size_t place = 0; place < rows.size(); ++place) {
      const size_t index = static_cast<size_t>(e * g.expert_capacity()) + place;
      CHECK_EQ(arrived.source_tokens[index], rows[place].token);
      if (call.options().weights == Weights::kWithDispatch) {
        CHECK_EQ(arrived.row_weights[index], rows[place].weight);
      }
      ++ranges[static_cast<size_t>(rows[place].source)];
      check_row(call, arrived, rows[place], e, static_cast<int64_t>(place));
    }
    int64_t first = 0;
    for (int32_t source = 0; source < g.ranks; ++source) {
      const int64_t count = ranges[static_cast<size_t>(source)];
      CHECK_EQ(arrived.ranges[static_cast<size_t>(e * g.ranks + source)], count | first << 32);
      first += count;
    }
  }
}

// The experts' outputs of one rank, with strides, and NaN in all unused rows.
struct Answers {
  Answers(const Call& call, int32_t rank, const std::vector<bool>& absent)
      : row_stride(call.geometry().hidden + 8),
        expert_stride(call.geometry().expert_capacity() * row_stride + 24) {
    const LowLatencyGeometry& g = call.geometry();
    y.assign(static_cast<size_t>(g.experts_per_rank() * expert_stride), 0x7fc0);
    for (int32_t e = 0; e < g.experts_per_rank(); ++e) {
      const int64_t expert = int64_t{rank} * g.experts_per_rank() + e;
      int64_t place = 0;
      for (const ExpectedRow& row : call.rows_of(expert, absent)) {
        uint16_t* out = y.data() + e * expert_stride + place++ * row_stride;
        for (int64_t column = 0; column < g.hidden; ++column) {
          out[column] = call.answer(expert, row.source, row.token, column);
        }
      }
    }
  }

  int64_t row_stride;
  int64_t expert_stride;
  std::vector<uint16_t> y;
};

// Checks the result of combine on `rank`, bit for bit, or with LogFMT within its error.
inline void check_result(const Call& call, int32_t rank, const std::vector<uint16_t>& out,
                         const std::vector<bool>& absent) {
  const LowLatencyGeometry& g = call.geometry();
  for (int64_t token = 0; token < call.batch(rank).tokens; ++token) {
    for (int64_t column = 0; column < g.hidden; ++column) {
      float expected = 0.0f;
      float error = 0.0f;
      for (int32_t peer = 0; peer < g.ranks; ++peer) {
        float sum = 0.0f;
        if (!call.partial_sum(peer, rank, token, column, &sum)) continue;
        if (absent[static_cast<size_t>(peer)]) continue;
        const float sent = reference::bf16_value(reference::bf16_of(sum));
        expected = reference::plus(expected, call.options().logfmt ? sum : sent);
        error += std::fabs(sum) * 0.03f + 1e-6f;
      }
      const uint16_t got = out[static_cast<size_t>(token * g.hidden + column)];
      if (call.options().logfmt) {
        const float value = reference::bf16_value(got);
        CHECK(std::fabs(value - expected) <= error + std::fabs(expected) * 0x1p-8f);
      } else {
        CHECK_EQ(got, reference::bf16_of(expected));
      }
    }
  }
}

}  // namespace fanfold
