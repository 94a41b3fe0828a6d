#include "host/low_latency_checks.h"

#include <limits>

#include "layout/row.h"

namespace fanfold {
namespace {

void check_routing(const LowLatencyGeometry& geometry, const LowLatencyTokens& tokens) {
  const int64_t entries = int64_t{tokens.tokens} * geometry.top_k;
  if (tokens.tokens < 0 || tokens.tokens > geometry.max_tokens) {
    throw BadArgument("tokens", std::to_string(tokens.tokens),
                      "from 0 to max_tokens = " + std::to_string(geometry.max_tokens));
  }
  tokens.topk_idx.require("topk_idx", entries);
  if (tokens.weighted) tokens.topk_weights.require("topk_weights", entries);
}

// Checks that `ranges` stay within each expert's block, and token counts within the tables.
void check_handle(const LowLatencyGeometry& geometry, const LowLatencyOutputs& outputs) {
  const int64_t ranges = int64_t{geometry.experts_per_rank()} * geometry.ranks;
  for (int64_t place = 0; place < ranges; ++place) {
    const int64_t begin = outputs.ranges[place] >> 32;
    const int64_t count = outputs.ranges[place] & std::numeric_limits<uint32_t>::max();
    if (begin >= 0 && begin + count <= geometry.expert_capacity()) continue;
    throw BadArgument("ranges[" + std::to_string(place) + "] of the handle",
                      "rows " + std::to_string(begin) + " to " + std::to_string(begin + count),
                      "within the " + std::to_string(geometry.expert_capacity()) +
                          " rows of an expert, as dispatch left it");
  }
  for (int32_t rank = 0; rank < geometry.ranks && outputs.source_counts != nullptr; ++rank) {
    const int32_t tokens = outputs.source_counts[rank];
    if (tokens >= 0 && tokens <= geometry.max_tokens) continue;
    throw BadArgument(
        "source_counts[" + std::to_string(rank) + "] of the handle", std::to_string(tokens),
        "from 0 to max_tokens = " + std::to_string(geometry.max_tokens) + ", as dispatch left it");
  }
}

void check_ready(const LowLatencyGeometry& geometry, const LowLatencyReady& ready) {
  if (ready.block_rows < 1) {
    throw BadArgument("block_rows", std::to_string(ready.block_rows), "at least 1");
  }
  const int64_t blocks = ceil_div(geometry.expert_capacity(), ready.block_rows);
  if (ready.blocks < blocks) {
    throw BadArgument("blocks", std::to_string(ready.blocks),
                      "at least " + std::to_string(blocks) + ", as each has " +
                          std::to_string(ready.block_rows) + " of an expert's rows");
  }
  ready.signals.require("signals", geometry.experts_per_rank() * int64_t{ready.blocks});
}

}  // namespace

void check_lent(const LowLatencyGeometry& geometry, const LowLatencyTokens& tokens) {
  check_routing(geometry, tokens);
  tokens.x.require("x", int64_t{tokens.tokens} * geometry.hidden);
  if (tokens.encoding == RowEncoding::kNvfp4) tokens.global_scale.require("global_scale", 1);
}

void check_lent(const LowLatencyGeometry& geometry, const LowLatencyReceived& received) {
  const int64_t experts = geometry.experts_per_rank();
  const int64_t places = experts * geometry.expert_capacity();
  const int64_t entries = int64_t{geometry.ranks} * geometry.max_tokens * geometry.top_k;
  received.rows.require("rows", places * value_bytes(received.encoding, geometry.hidden));
  if (received.encoding == RowEncoding::kNvfp4) {
    const Nvfp4ScaleLayout scales{geometry.expert_capacity(), geometry.hidden};
    received.scales.require("scales", experts * scales.words() * 4);
  } else if (received.encoding != RowEncoding::kBf16) {
    const int64_t blocks = blocks_of(geometry.hidden);
    const bool packed = received.scale_format == ScaleFormat::kUe8m0;
    received.scales.require("scales", places * (packed ? ceil_div(blocks, 4) : blocks) * 4);
  }
  received.counts.require("counts", experts);
  received.source_tokens.require("source_tokens", places);
  received.ranges.require("ranges", experts * geometry.ranks);
  received.row_weights.require_if_lent("row_weights", places);
  received.source_counts.require_if_lent("source_counts", geometry.ranks);
  received.experts.require_if_lent("experts", entries);
  received.weights.require_if_lent("weights", entries);
  received.expert_totals.require_if_lent("expert_totals", experts);
  received.wait_ns.require_if_lent("wait_ns", geometry.ranks);
}

void check_lent(const LowLatencyGeometry& geometry, const LowLatencyOutputs& outputs) {
  const int64_t experts = geometry.experts_per_rank();
  const int64_t entries = int64_t{geometry.ranks} * geometry.max_tokens * geometry.top_k;
  // The last row of an expert's block ends where the next block may begin.
  const Strided rows{experts, geometry.expert_capacity(), outputs.expert_stride,
                     outputs.row_stride};
  outputs.y.require("y", rows.extent() == 0 ? 0 : rows.extent() - 1 + geometry.hidden);
  outputs.ranges.require("ranges", experts * geometry.ranks);
  if (outputs.late_tokens != nullptr) {
    check_routing(geometry, *outputs.late_tokens);
  } else {
    outputs.source_counts.require("source_counts", geometry.ranks);
    outputs.experts.require("experts", entries);
    outputs.weights.require_if_lent("weights", entries);
  }
  check_handle(geometry, outputs);
  if (outputs.ready.signals != nullptr) check_ready(geometry, outputs.ready);
}

void check_lent(const LowLatencyGeometry& geometry, const LowLatencyResult& result) {
  result.out.require("out", int64_t{result.tokens} * geometry.hidden);
  result.topk_idx.require("topk_idx", int64_t{result.tokens} * geometry.top_k);
  result.wait_ns.require_if_lent("wait_ns", geometry.ranks);
}

}  // namespace fanfold
