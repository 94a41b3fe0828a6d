#include "host/high_throughput.h"

#include <limits>
#include <utility>

#include "host/high_throughput_checks.h"
#include "host/high_throughput_combine.h"
#include "host/high_throughput_dispatch.h"
#include "host/routes.h"
#include "host/stream_paths.h"

namespace fanfold {
namespace {

size_t size_of(int64_t value) { return static_cast<size_t>(value); }

CallSignature signature_of(HighThroughputCall call, const HighThroughputTokens& tokens) {
  return CallSignature{
      .call = call,
      .experts = tokens.experts,
      .top_k = tokens.top_k,
      .weighted = tokens.weighted ? 1 : 0,
      .scale_words = tokens.scale_words,
      .reserved = 0,
      .row_bytes = tokens.row_bytes,
  };
}

std::vector<int64_t> planned_rows(const HighThroughputPlan& plan, int32_t ranks) {
  std::vector<int64_t> rows;
  int32_t before = 0;
  for (int32_t source = 0; source < ranks; ++source) {
    const int32_t prefix = plan.source_prefix[source];
    rows.push_back(prefix - std::exchange(before, prefix));
  }
  return rows;
}

// The records that each rank reads in the stream of this rank's dispatch to the rank's host.
std::vector<int64_t> dispatch_records(const Exchange& exchange, const TokenRanks& token_ranks,
                                      int32_t pieces) {
  std::vector<int64_t> per_host;
  per_host.reserve(size_of(exchange.hosts().count()));
  for (int32_t host = 0; host < exchange.hosts().count(); ++host) {
    per_host.push_back(token_ranks.count_of(others_on(exchange, host)) * pieces);
  }
  std::vector<int64_t> records;
  records.reserve(size_of(exchange.ranks()));
  for (int32_t peer = 0; peer < exchange.ranks(); ++peer) {
    records.push_back(per_host[size_of(exchange.hosts().host_of(peer))]);
  }
  return records;
}

// In a combine, the records that a peer on this host reads of this rank, and those that this rank
// expects of its gateway on another one.
std::vector<int64_t> combine_records(const Exchange& exchange, const TokenRanks& token_ranks,
                                     const std::vector<int64_t>& rows, int32_t pieces) {
  const Hosts& hosts = exchange.hosts();
  std::vector<int64_t> records;
  for (int32_t peer = 0; peer < exchange.ranks(); ++peer) {
    const int32_t host = hosts.host_of(peer);
    int64_t count = 0;
    if (exchange.is_here(peer)) {
      count = rows[size_of(peer)];
    } else if (hosts.gateway(exchange.rank(), host) == peer) {
      count = token_ranks.count_of(hosts.members(host));
    }
    records.push_back(count * pieces);
  }
  return records;
}

// Refuses the call that has begun if `check` throws BadArgument for an array of this rank.
template <typename Check>
void require_lent(Exchange& exchange, const Check& check) {
  try {
    check();
  } catch (const BadArgument& error) {
    exchange.refuse(error.what());
    throw;
  }
}

// Refuses the call that has begun if the rings are too small for a record.
void require_room(Exchange& exchange, const StreamLayout& layout) {
  if (layout.chunks > 0) return;
  const BadArgument error("staging_bytes", std::to_string(exchange.staging_bytes()),
                          "enough for " + std::to_string(StreamLayout::kLeastChunks) +
                              " records of " +
                              std::to_string(layout.record.side_bytes() + kRowAlignment) +
                              " bytes, in combine for each of the ranks (FANFOLD_STAGING_BYTES)");
  exchange.refuse(error.what());
  throw BadArgument(error);
}

}  // namespace

HighThroughput::HighThroughput(SymmetricMemory& memory, int64_t offset, int64_t bytes,
                               uint32_t epoch)
    : exchange_(memory, offset, bytes, epoch) {}

void HighThroughput::exchange_counts(const HighThroughputTokens& tokens, HighThroughputPlan& plan,
                                     int32_t alignment) {
  const int32_t ranks = exchange_.ranks();
  exchange_.begin(Phase::kHighThroughputCounts);
  require_lent(exchange_, [&] {
    check_lent(tokens, true);
    check_counts_lent(plan, ranks);
  });
  const StreamLayout layout = dispatch_stream(tokens, true, dispatch_ring_bytes(exchange_));
  require_room(exchange_, layout);
  std::vector<int32_t> per_rank(size_of(ranks));
  std::vector<int32_t> per_expert(size_of(tokens.experts));
  count_routes(Routes{tokens.topk_idx, tokens.tokens, tokens.top_k, tokens.experts, ranks},
               RouteCounts{per_rank, per_expert, plan.is_token_in_rank, false});
  const TokenRanks token_ranks{plan.is_token_in_rank, tokens.tokens, ranks};
  exchange_.send_headers(Exchange::Headers{
      .signature = signature_of(HighThroughputCall::kDispatch, tokens),
      .records = dispatch_records(exchange_, token_ranks, layout.pieces),
      .rows = std::vector<int64_t>(per_rank.begin(), per_rank.end()),
      .counts = per_expert.data(),
  });
  exchange_.await_headers();
  adopt_counts(plan, alignment);
  sent_rows_.assign(per_rank.begin(), per_rank.end());
  counted_ = true;
}

void HighThroughput::adopt_counts(HighThroughputPlan& plan, int32_t alignment) {
  const int32_t ranks = exchange_.ranks();
  const int32_t locals = plan.experts / ranks;
  std::vector<int64_t> per_expert(size_of(locals), 0);
  first_rows_.assign(size_of(int64_t{ranks} * locals), 0);
  plan.received = 0;
  int64_t rows = 0;
  for (int32_t source = 0; source < ranks; ++source) {
    const bool present = exchange_.present(source);
    plan.received += present ? exchange_.header(source).rows : 0;
    plan.source_prefix[source] = static_cast<int32_t>(plan.received);
    for (int32_t e = 0; e < locals; ++e) {
      first_rows_[size_of(int64_t{source} * locals + e)] = per_expert[size_of(e)];
      per_expert[size_of(e)] += present ? exchange_.counts(source)[e] : 0;
    }
  }
  for (int32_t e = 0; e < locals; ++e) {
    plan.tokens_per_expert[e] = static_cast<int32_t>(per_expert[size_of(e)]);
    plan.offsets[e] = rows;
    for (int32_t source = 0; source < ranks; ++source) {
      first_rows_[size_of(int64_t{source} * locals + e)] += rows;
    }
    rows += align_up(per_expert[size_of(e)], alignment);
  }
  plan.offsets[locals] = rows;
  if (rows <= std::numeric_limits<int32_t>::max()) return;
  const BadArgument error("rows that arrive", std::to_string(rows),
                          "at most 2147483647: send fewer tokens in one call");
  exchange_.refuse(error.what());
  throw BadArgument(error);
}

void HighThroughput::dispatch_rows(const HighThroughputTokens& tokens,
                                   const HighThroughputPlan& plan,
                                   const HighThroughputReceived& received) {
  if (!std::exchange(counted_, false)) {
    throw Misuse("dispatch_rows must follow exchange_counts of the same dispatch");
  }
  exchange_.enter(Phase::kHighThroughputDispatch);
  require_lent(exchange_, [&] {
    check_lent(tokens, true);
    check_rows_lent(plan, exchange_.ranks());
    check_lent(received, tokens, plan, exchange_.ranks());
  });
  const StreamLayout layout = dispatch_stream(tokens, true, dispatch_ring_bytes(exchange_));
  Dispatch(exchange_, layout, tokens, plan, received, &first_rows_).run(nullptr);
  count_dispatched(tokens, plan, sent_rows_);
}

void HighThroughput::dispatch_cached(const HighThroughputTokens& tokens,
                                     const HighThroughputPlan& plan,
                                     const HighThroughputReceived& received) {
  const int32_t ranks = exchange_.ranks();
  exchange_.begin(Phase::kHighThroughputDispatch);
  require_lent(exchange_, [&] {
    check_lent(tokens, false);
    check_rows_lent(plan, ranks);
    check_numbers(plan, ranks);
    check_lent(received, tokens, plan, ranks);
  });
  const StreamLayout layout = dispatch_stream(tokens, false, dispatch_ring_bytes(exchange_));
  require_room(exchange_, layout);
  const TokenRanks token_ranks{plan.is_token_in_rank, tokens.tokens, ranks};
  const std::vector<int64_t> rows = token_ranks.count();
  exchange_.send_headers(Exchange::Headers{
      .signature = signature_of(HighThroughputCall::kCachedDispatch, tokens),
      .records = dispatch_records(exchange_, token_ranks, layout.pieces),
      .rows = rows,
      .counts = nullptr,
  });
  const std::vector<int64_t> expected = planned_rows(plan, ranks);
  Dispatch(exchange_, layout, tokens, plan, received, nullptr).run(&expected);
  count_dispatched(tokens, plan, rows);
}

void HighThroughput::count_dispatched(const HighThroughputTokens& tokens,
                                      const HighThroughputPlan& plan,
                                      const std::vector<int64_t>& rows) {
  const int64_t row_bytes = tokens.row_bytes + int64_t{4} * tokens.scale_words;
  RowCounts& counted = exchange_.counted_rows();
  for (int32_t peer = 0; peer < exchange_.ranks(); ++peer) {
    const int64_t count = rows[size_of(peer)];
    counted.sent(Phase::kHighThroughputDispatch, peer, count, count * row_bytes);
  }
  const int32_t locals = plan.experts / exchange_.ranks();
  counted.received(exchange_.rank() * locals, {plan.tokens_per_expert.data(), size_of(locals)});
}

void HighThroughput::combine(const HighThroughputOutputs& outputs, const HighThroughputPlan& plan,
                             const HighThroughputResult& result) {
  const int32_t ranks = exchange_.ranks();
  exchange_.begin(Phase::kHighThroughputCombine);
  require_lent(exchange_, [&] {
    check_rows_lent(plan, ranks);
    check_numbers(plan, ranks);
    check_lent(outputs, plan, ranks);
    check_lent(result, outputs, plan);
  });
  const StreamLayout layout = combine_stream(outputs, plan.top_k, combine_ring_bytes(exchange_));
  require_room(exchange_, layout);
  const std::vector<int64_t> rows = planned_rows(plan, ranks);
  const TokenRanks token_ranks{plan.is_token_in_rank, plan.tokens, ranks};
  exchange_.send_headers(Exchange::Headers{
      .signature = CallSignature{.call = HighThroughputCall::kCombine,
                                 .experts = plan.experts,
                                 .top_k = plan.top_k,
                                 .weighted = outputs.weighted ? 1 : 0,
                                 .scale_words = 0,
                                 .reserved = 0,
                                 .row_bytes = int64_t{2} * outputs.hidden},
      .records = combine_records(exchange_, token_ranks, rows, layout.pieces),
      .rows = rows,
      .counts = nullptr,
  });
  Combine(exchange_, layout, outputs, plan, result).run(token_ranks.count());
  if (outputs.hidden == 0) return;  // only weights went back
  for (int32_t peer = 0; peer < ranks; ++peer) {
    const int64_t count = rows[size_of(peer)];
    exchange_.counted_rows().sent(Phase::kHighThroughputCombine, peer, count,
                                  count * 2 * outputs.hidden);
  }
}

// --- Refusals -------------------------------------------------------------------------------

void HighThroughput::refuse_dispatch(const std::string& reason) {
  // After exchange_counts the call has begun already.
  if (!std::exchange(counted_, false)) exchange_.begin(Phase::kHighThroughputDispatch);
  exchange_.refuse(reason);
}

void HighThroughput::refuse_combine(const std::string& reason) {
  exchange_.begin(Phase::kHighThroughputCombine);
  exchange_.refuse(reason);
}

}  // namespace fanfold
