// One high-throughput dispatch and combine of all ranks: their inputs, and the expected outputs,
// computed from the contract alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "check.hpp"
#include "host/high_throughput.h"
#include "links.hpp"
#include "ranks.hpp"
#include "reference.hpp"

namespace fanfold::high_throughput {

inline size_t at(int64_t index) { return static_cast<size_t>(index); }

struct Shape {
  int32_t ranks;
  int32_t experts;
  int32_t top_k;
  int32_t hidden;
  int32_t most_tokens;
  int32_t alignment = 1;
  int32_t scale_words = 0;
  int64_t slack = 0;  // rows of the capacity beyond the received rows
  bool expert_major = true;
  bool weighted = true;
  bool returns_weights = false;

  int32_t locals() const { return experts / ranks; }
};

// The input of one rank.
struct Batch {
  int32_t tokens;
  std::vector<uint16_t> x;
  std::vector<uint32_t> scales;
  std::vector<int64_t> topk_idx;
  std::vector<float> topk_weights;
  std::vector<uint16_t> bias;
};

// A row that a rank must receive.
struct Row {
  int32_t source;
  int32_t token;
  std::vector<int64_t> locals;  // of each top-k entry; -1 if another rank has the expert
};

inline Shape random_shape(Random& random, int32_t ranks) {
  return Shape{.ranks = ranks,
               .experts = ranks * random.between(1, 6),
               .top_k = random.between(1, 7),
               .hidden = 8 * random.between(2, 40),
               .most_tokens = random.one_in(5) ? 0 : random.between(1, 14),
               .alignment = random.one_in(3) ? 4 : 1,
               .scale_words = random.one_in(3) ? random.between(1, 5) : 0,
               .slack = random.between(0, 3),
               .expert_major = random.one_in(2),
               .weighted = !random.one_in(4),
               .returns_weights = random.one_in(2)};
}

// A whole call. All ranks make the same call from the same seed.
class Call {
 public:
  Call(uint64_t seed, const Shape& shape) : shape_(shape) {
    Random random(seed);
    for (int32_t rank = 0; rank < shape.ranks; ++rank) batches_.push_back(make_batch(random));
  }

  const Shape& shape() const { return shape_; }
  const Batch& batch(int32_t rank) const { return batches_[at(rank)]; }

  // Gives `rank` one token of ones, for one expert.
  void set_token(int32_t rank, int64_t expert) {
    const std::vector<uint16_t> ones(at(shape_.hidden), 0x3f80);
    batches_[at(rank)] = Batch{1, ones, {}, {expert}, {1.0f}, ones};
  }

  std::vector<Row> rows_of(int32_t rank) const {
    std::vector<Row> rows;
    for (int32_t source = 0; source < shape_.ranks; ++source) {
      for (int32_t token = 0; token < batch(source).tokens; ++token) {
        Row row{source, token, {}};
        for (int32_t k = 0; k < shape_.top_k; ++k) {
          const int64_t expert = batch(source).topk_idx[at(int64_t{token} * shape_.top_k + k)];
          const bool mine = expert >= 0 && expert / shape_.locals() == rank;
          row.locals.push_back(mine ? expert % shape_.locals() : -1);
        }
        if (*std::max_element(row.locals.begin(), row.locals.end()) >= 0) rows.push_back(row);
      }
    }
    return rows;
  }

  float weight(const Row& row, int32_t k) const {
    return batch(row.source).topk_weights[at(int64_t{row.token} * shape_.top_k + k)];
  }
  // The sum over all top-k entries that name the expert.
  float weight_of(const Row& row, int64_t local) const {
    volatile float sum = 0.0f;
    bool first = true;
    for (int32_t k = 0; k < shape_.top_k; ++k) {
      if (row.locals[at(k)] != local) continue;
      sum = std::exchange(first, false) ? weight(row, k) : sum + weight(row, k);
    }
    return sum;
  }
  // Local experts of a row, each once, in top-k order.
  static std::vector<int64_t> distinct(const Row& row) {
    std::vector<int64_t> locals;
    for (const int64_t local : row.locals) {
      const bool known = std::find(locals.begin(), locals.end(), local) != locals.end();
      if (local >= 0 && !known) locals.push_back(local);
    }
    return locals;
  }

  // The output of the experts of `rank` for a value. Sums of these outputs cancel, so that another
  // order of additions, or a missing rounding, gives another result.
  static uint16_t answer_of(int32_t rank, uint16_t x) {
    constexpr float kFactors[] = {4096.0f, -4096.0f, 1.5f, -0.375f, 3.0f};
    return reference::bf16_of(kFactors[rank % 5] * reference::bf16_value(x));
  }

  // The expected result of combine on `rank`: the sum over the ranks of its host and, of each other
  // host, over the rounded sum of the host's ranks.
  std::vector<uint16_t> result_of(int32_t rank) const {
    const Batch& own = batch(rank);
    const std::vector<int32_t> host = hosts_for(shape_.ranks, hosts_of_worlds);
    std::vector<float> sum(own.x.size());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = reference::bf16_value(own.bias[i]);
    for (int32_t peer = 0; peer < shape_.ranks; ++peer) {
      if (host[at(peer)] == host[at(rank)]) {
        add_rows(rank, peer, sum);
      } else if (peer == 0 || host[at(peer)] != host[at(peer - 1)]) {
        add_host(rank, host, host[at(peer)], sum);
      }
    }
    std::vector<uint16_t> result(sum.size());
    std::transform(sum.begin(), sum.end(), result.begin(), reference::bf16_of);
    return result;
  }

  // The value that one rank returns for a token whose experts all output `y`.
  uint16_t part_of(const Row& row, uint16_t y) const {
    if (!shape_.expert_major) return y;
    volatile float part = 0.0f;
    for (const int64_t local : distinct(row)) {
      const volatile float product =
          (shape_.weighted ? weight_of(row, local) : 1.0f) * reference::bf16_value(y);
      part = part + product;
    }
    return reference::bf16_of(part);
  }

 private:
  // Adds what `peer` returns to `rank`; returns which tokens it returns anything for.
  std::vector<bool> add_rows(int32_t rank, int32_t peer, std::vector<float>& sum) const {
    const Batch& own = batch(rank);
    std::vector<bool> touched(at(own.tokens));
    for (const Row& row : rows_of(peer)) {
      if (row.source != rank) continue;
      touched[at(row.token)] = true;
      for (int64_t column = 0; column < shape_.hidden; ++column) {
        const size_t place = at(int64_t{row.token} * shape_.hidden + column);
        volatile float total = sum[place];
        total = total + reference::bf16_value(part_of(row, answer_of(peer, own.x[place])));
        sum[place] = total;
      }
    }
    return touched;
  }

  // Adds the sums of the ranks of `host`, rounded to bfloat16.
  void add_host(int32_t rank, const std::vector<int32_t>& hosts, int32_t host,
                std::vector<float>& sum) const {
    std::vector<float> part(sum.size());
    std::vector<bool> touched(at(batch(rank).tokens));
    for (int32_t peer = 0; peer < shape_.ranks; ++peer) {
      if (hosts[at(peer)] != host) continue;
      const std::vector<bool> by_peer = add_rows(rank, peer, part);
      for (size_t token = 0; token < touched.size(); ++token) {
        touched[token] = touched[token] || by_peer[token];
      }
    }
    for (size_t place = 0; place < sum.size(); ++place) {
      if (!touched[place / at(shape_.hidden)]) continue;
      volatile float total = sum[place];
      total = total + reference::bf16_value(reference::bf16_of(part[place]));
      sum[place] = total;
    }
  }

  Batch make_batch(Random& random) const {
    const int32_t tokens = random.between(0, shape_.most_tokens);
    Batch batch{tokens, {}, {}, {}, {}, {}};
    const auto value = [&] {
      const auto exponent = static_cast<uint32_t>(random.between(121, 128));
      return static_cast<uint16_t>((random.next() & 0x807f) | exponent << 7);
    };
    for (int64_t i = 0; i < int64_t{tokens} * shape_.hidden; ++i) {
      batch.x.push_back(value());
      batch.bias.push_back(value());
    }
    for (int64_t i = 0; i < int64_t{tokens} * shape_.scale_words; ++i) {
      batch.scales.push_back(static_cast<uint32_t>(random.next()));
    }
    const int32_t style = random.between(0, 3);
    for (int64_t i = 0; i < int64_t{tokens} * shape_.top_k; ++i) {
      const int32_t low = style == 1 ? -1 : 0;
      const int32_t high = style == 2 ? std::min(shape_.experts, 2) : shape_.experts;
      batch.topk_idx.push_back(style == 3 ? shape_.experts - 1 : random.between(low, high - 1));
      const float weight = random.real(0.5f, 1.0f) * (random.one_in(3) ? 1.0f : 300.0f);
      batch.topk_weights.push_back(random.one_in(2) ? weight : -weight);
    }
    return batch;
  }

  Shape shape_;
  std::vector<Batch> batches_;
};

// The plan and the received rows of one rank, with the memory of both.
class Arrived {
 public:
  Arrived(const Call& call, int32_t rank)
      : call_(&call), in_rank_(at(int64_t{call.batch(rank).tokens} * call.shape().ranks)),
        prefix_(at(call.shape().ranks)), per_expert_(at(call.shape().locals())),
        offsets_(at(call.shape().locals() + 1)), tokens_(call.batch(rank).tokens) {}

  HighThroughputPlan plan() {
    return HighThroughputPlan{
        .experts = call_->shape().experts,
        .top_k = call_->shape().top_k,
        .tokens = tokens_,
        .received = received,
        .is_token_in_rank = in_rank_,
        .source_prefix = prefix_,
        .tokens_per_expert = per_expert_,
        .offsets = offsets_,
        .source_token = source_token_,
        .topk_idx = topk_idx_,
        .topk_weights = call_->shape().weighted ? Array<float>(topk_weights_) : nullptr,
        .rows_of = rows_of_,
    };
  }

  // Allocates memory for the rows after the counts are known, filled with values that dispatch must
  // overwrite.
  HighThroughputReceived allocate() {
    const Shape& shape = call_->shape();
    source_token_.assign(at(received), -7);
    topk_idx_.assign(at(received * shape.top_k), -7);
    topk_weights_.assign(at(received * shape.top_k), -7.0f);
    rows_of_.assign(at(received * shape.top_k), -7);
    return room();
  }
  HighThroughputReceived room() {
    const Shape& shape = call_->shape();
    capacity_ = (shape.expert_major ? offsets_.back() : received) + shape.slack;
    rows.assign(at(capacity_ * shape.hidden), 0x5555);
    scales.assign(at(capacity_ * shape.scale_words), 0x5555u);
    row_weights.assign(at(capacity_), -7.0f);
    ranks_.assign(at(capacity_), -7);
    sources_.assign(at(capacity_), -7);
    const bool weights = shape.expert_major && shape.weighted;
    return HighThroughputReceived{
        .rows = {reinterpret_cast<std::byte*>(rows.data()), 2 * std::ssize(rows)},
        .scales = scales,
        .row_weights = weights ? Array<float>(row_weights) : nullptr,
        .row_source_rank = ranks_,
        .row_source_token = sources_,
        .capacity = capacity_,
        .expert_major = shape.expert_major,
    };
  }

  void check_plan(int32_t rank) const {
    const Shape& shape = call_->shape();
    const std::vector<Row> expected = call_->rows_of(rank);
    CHECK_EQ(received, std::ssize(expected));
    CHECK_EQ(prefix_.back(), received);
    for (int64_t n = 0; n < received; ++n) {
      const Row& row = expected[at(n)];
      CHECK_EQ(source_token_[at(n)], row.token);
      CHECK(n < prefix_[at(row.source)]);
      for (int32_t k = 0; k < shape.top_k; ++k) {
        const size_t entry = at(n * shape.top_k + k);
        CHECK_EQ(topk_idx_[entry], row.locals[at(k)]);
        if (!shape.weighted) continue;
        CHECK_EQ(topk_weights_[entry], row.locals[at(k)] < 0 ? 0.0f : call_->weight(row, k));
      }
    }
  }

  // Checks the rows: expert-major, the rows of each expert in turn; token-major, each row once. All
  // other rows must be zero.
  void check_rows(int32_t rank) const {
    const std::vector<Row> expected = call_->rows_of(rank);
    std::map<int64_t, std::pair<const Row*, int64_t>> filled;
    if (call_->shape().expert_major) {
      int64_t begin = 0;
      for (int32_t local = 0; local < call_->shape().locals(); ++local) {
        int64_t count = 0;
        for (const Row& row : expected) {
          const bool named =
              std::find(row.locals.begin(), row.locals.end(), local) != row.locals.end();
          if (named) filled[begin + count++] = {&row, local};
        }
        CHECK_EQ(offsets_[at(local)], begin);
        CHECK_EQ(per_expert_[at(local)], count);
        begin += align_up(count, call_->shape().alignment);
      }
      CHECK_EQ(offsets_.back(), begin);
    } else {
      for (size_t n = 0; n < expected.size(); ++n) {
        filled[static_cast<int64_t>(n)] = {&expected[n], -1};
      }
    }
    for (int64_t place = 0; place < capacity_; ++place) {
      const auto found = filled.find(place);
      if (found == filled.end()) {
        check_place(place, nullptr, -1);
      } else {
        check_place(place, found->second.first, found->second.second);
      }
    }
  }

  int64_t received = 0;
  std::vector<uint16_t> rows;
  std::vector<uint32_t> scales;
  std::vector<float> row_weights;

 private:
  void check_place(int64_t place, const Row* row, int64_t local) const {
    const Shape& shape = call_->shape();
    CHECK_EQ(ranks_[at(place)], row == nullptr ? -1 : row->source);
    CHECK_EQ(sources_[at(place)], row == nullptr ? -1 : row->token);
    for (int64_t column = 0; column < shape.hidden; ++column) {
      const uint16_t sent =
          row == nullptr
              ? uint16_t{0}
              : call_->batch(row->source).x[at(int64_t{row->token} * shape.hidden + column)];
      CHECK_EQ(rows[at(place * shape.hidden + column)], sent);
    }
    for (int64_t word = 0; word < shape.scale_words; ++word) {
      const uint32_t sent = row == nullptr
                                ? 0u
                                : call_->batch(row->source)
                                      .scales[at(int64_t{row->token} * shape.scale_words + word)];
      CHECK_EQ(scales[at(place * shape.scale_words + word)], sent);
    }
    if (!shape.expert_major || !shape.weighted) return;
    CHECK_EQ(row_weights[at(place)], row == nullptr ? 0.0f : call_->weight_of(*row, local));
  }

  const Call* call_;
  std::vector<uint8_t> in_rank_;
  std::vector<int32_t> prefix_;
  std::vector<int32_t> per_expert_;
  std::vector<int64_t> offsets_;
  int32_t tokens_;
  std::vector<int32_t> source_token_;
  std::vector<int64_t> topk_idx_;
  std::vector<float> topk_weights_;
  std::vector<int32_t> rows_of_;
  std::vector<int32_t> ranks_;
  std::vector<int32_t> sources_;
  int64_t capacity_ = 0;
};

inline HighThroughputTokens tokens_of(const Call& call, int32_t rank) {
  const Batch& own = call.batch(rank);
  const Shape& shape = call.shape();
  return HighThroughputTokens{
      .rows = {reinterpret_cast<const std::byte*>(own.x.data()), 2 * std::ssize(own.x)},
      .row_bytes = int64_t{2} * shape.hidden,
      .scales = own.scales,
      .scale_words = shape.scale_words,
      .scale_token_stride = shape.scale_words,
      .scale_word_stride = 1,
      .topk_idx = own.topk_idx,
      .topk_weights = shape.weighted ? Array<const float>(own.topk_weights) : nullptr,
      .weighted = shape.weighted,
      .tokens = own.tokens,
      .experts = shape.experts,
      .top_k = shape.top_k,
  };
}

}  // namespace fanfold::high_throughput
