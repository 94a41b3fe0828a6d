#include "host/high_throughput_checks.h"

namespace fanfold {
namespace {

void require_in(const std::string& name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  throw BadArgument(
      "plan." + name, std::to_string(value),
      "from " + std::to_string(low) + " to " + std::to_string(high) + ", as dispatch left it");
}

std::string indexed(const char* name, int64_t place) {
  return std::string(name) + "[" + std::to_string(place) + "]";
}

int64_t expert_rows(const HighThroughputPlan& plan, int32_t ranks) {
  return plan.offsets[plan.experts / ranks];
}

}  // namespace

void check_lent(const HighThroughputTokens& tokens, bool routed) {
  const int64_t entries = int64_t{tokens.tokens} * tokens.top_k;
  tokens.rows.require("x", tokens.tokens * tokens.row_bytes);
  const Strided scales{tokens.tokens, tokens.scale_words, tokens.scale_token_stride,
                       tokens.scale_word_stride};
  tokens.scales.require("scales", scales.extent());
  if (!routed) return;
  tokens.topk_idx.require("topk_idx", entries);
  if (tokens.weighted) tokens.topk_weights.require("topk_weights", entries);
}

void check_counts_lent(const HighThroughputPlan& plan, int32_t ranks) {
  const int64_t locals = plan.experts / ranks;
  plan.is_token_in_rank.require("plan.is_token_in_rank", int64_t{plan.tokens} * ranks);
  plan.source_prefix.require("plan.source_prefix", ranks);
  plan.tokens_per_expert.require("plan.tokens_per_expert", locals);
  plan.offsets.require("plan.offsets", locals + 1);
}

void check_rows_lent(const HighThroughputPlan& plan, int32_t ranks) {
  check_counts_lent(plan, ranks);
  const int64_t entries = plan.received * plan.top_k;
  plan.source_token.require("plan.source_token", plan.received);
  plan.topk_idx.require("plan.topk_idx", entries);
  plan.topk_weights.require_if_lent("plan.topk_weights", entries);
  plan.rows_of.require("plan.rows_of", entries);
}

void check_lent(const HighThroughputReceived& received, const HighThroughputTokens& tokens,
                const HighThroughputPlan& plan, int32_t ranks) {
  const int64_t needed = received.expert_major ? expert_rows(plan, ranks) : plan.received;
  if (received.capacity < needed) {
    throw BadArgument("capacity", std::to_string(received.capacity),
                      "at least the " + std::to_string(needed) + " rows that arrive");
  }
  received.rows.require("rows", received.capacity * tokens.row_bytes);
  received.scales.require("scales", received.capacity * tokens.scale_words);
  received.row_weights.require_if_lent("row_weights", received.capacity);
  received.row_source_rank.require("row_source_rank", received.capacity);
  received.row_source_token.require("row_source_token", received.capacity);
  if (received.row_weights != nullptr) {
    plan.topk_weights.require("plan.topk_weights", plan.received * plan.top_k);
  }
}

void check_lent(const HighThroughputOutputs& outputs, const HighThroughputPlan& plan,
                int32_t ranks) {
  const int64_t rows = outputs.expert_major ? expert_rows(plan, ranks) : plan.received;
  outputs.y.require("y", rows * outputs.hidden);
  outputs.row_weights.require_if_lent("row_weights", rows);
  if (!outputs.weighted) return;
  outputs.topk_weights.require("topk_weights", outputs.expert_major ? rows : rows * plan.top_k);
}

void check_lent(const HighThroughputResult& result, const HighThroughputOutputs& outputs,
                const HighThroughputPlan& plan) {
  const int64_t elements = int64_t{plan.tokens} * outputs.hidden;
  result.out.require("out", elements);
  for (const Array<const uint16_t>& bias : result.bias) bias.require_if_lent("bias", elements);
  if (outputs.weighted) result.weights.require("weights", int64_t{plan.tokens} * plan.top_k);
}

void check_numbers(const HighThroughputPlan& plan, int32_t ranks) {
  const int32_t locals = plan.experts / ranks;
  int64_t before = 0;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    require_in(indexed("source_prefix", rank), plan.source_prefix[rank], before, plan.received);
    before = plan.source_prefix[rank];
  }
  require_in(indexed("source_prefix", ranks - 1), before, plan.received, plan.received);
  require_in("offsets[0]", plan.offsets[0], 0, 0);
  for (int32_t e = 0; e < locals; ++e) {
    const int64_t rows = plan.offsets[e + 1] - plan.offsets[e];
    require_in(indexed("tokens_per_expert", e), plan.tokens_per_expert[e], 0, rows);
  }
  const int64_t rows = plan.offsets[locals];
  for (int64_t entry = 0; entry < plan.received * plan.top_k; ++entry) {
    const int64_t row = plan.rows_of[entry];
    // Build the name only for a bad entry: building it for every one would take longer than the
    // check.
    if (row < -1 || row >= rows) require_in(indexed("rows_of", entry), row, -1, rows - 1);
  }
}

}  // namespace fanfold
