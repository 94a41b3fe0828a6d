#include "host/high_throughput_dispatch.h"

#include <algorithm>
#include <cstring>

namespace fanfold {
namespace {

size_t size_of(int64_t value) { return static_cast<size_t>(value); }

std::vector<int32_t> others(const Exchange& exchange) {
  std::vector<int32_t> peers;
  // Every rank begins with the next one, so that they do not all wake rank 0 first.
  for (int32_t step = 1; step < exchange.ranks(); ++step) {
    peers.push_back((exchange.rank() + step) % exchange.ranks());
  }
  return peers;
}

}  // namespace

StreamLayout dispatch_stream(const HighThroughputTokens& tokens, bool routed,
                             int64_t staging_bytes) {
  const int32_t ids = routed ? tokens.top_k : 0;
  const int32_t weights = routed && tokens.weighted ? tokens.top_k : 0;
  return StreamLayout::of(staging_bytes, tokens.row_bytes,
                          RecordLayout{ids, weights, tokens.scale_words, 0});
}

Dispatch::Dispatch(Exchange& exchange, const StreamLayout& layout,
                   const HighThroughputTokens& tokens, const HighThroughputPlan& plan,
                   const HighThroughputReceived& into, const std::vector<int64_t>* first_rows)
    : exchange_(exchange), layout_(layout), tokens_(tokens), plan_(plan), into_(into),
      first_rows_(first_rows), token_ranks_{plan.is_token_in_rank, tokens.tokens, exchange.ranks()},
      locals_(plan.experts / exchange.ranks()), first_expert_(exchange.rank() * locals_),
      copy_((into.expert_major ? plan.offsets[locals_] : plan.received) * tokens.row_bytes,
            exchange.ranks()),
      writer_(exchange, layout, exchange.staging(exchange.rank()), others(exchange),
              token_ranks_.count_but(exchange.rank()) * layout.pieces),
      ids_(size_of(plan.top_k)) {
  if (first_rows != nullptr) next_rows_ = *first_rows;
  for (int32_t source = 0; source < exchange.ranks(); ++source) {
    readers_.emplace_back(exchange, layout, exchange.staging(source), source);
    const int64_t begin = source == 0 ? 0 : plan.source_prefix[source - 1];
    arrivals_.push_back(Arrivals{begin, plan.source_prefix[source]});
  }
}

void Dispatch::run(const std::vector<int64_t>* expected_rows) {
  blank_padding();
  open_announced(exchange_, readers_, expected_rows);
  while (!finished()) {
    bool progress = stage();
    for (StreamReader& reader : readers_) progress |= take(reader);
    if (!progress && !finished()) {
      for (StreamReader& reader : readers_) reader.acknowledge();
      exchange_.wait([&] { return ready(); }, [&](int32_t peer) { return debt(peer); });
    }
    open_announced(exchange_, readers_, expected_rows);
  }
  exchange_.leave();
  check_complete();
}

bool Dispatch::finished() const {
  return token_ == tokens_.tokens && writer_.closed() &&
         std::all_of(readers_.begin(), readers_.end(),
                     [](const StreamReader& reader) { return reader.complete(); });
}

bool Dispatch::ready() {
  if (exchange_.news() || finished()) return true;
  if (token_ < tokens_.tokens && writer_.has_room()) return true;
  return std::any_of(readers_.begin(), readers_.end(),
                     [](const StreamReader& reader) { return reader.arrived(); });
}

std::optional<Debt> Dispatch::debt(int32_t peer) const {
  if (const auto owed = exchange_.announcement_debt(peer)) return owed;
  if (const auto owed = readers_[size_of(peer)].debt()) return owed;
  return token_ < tokens_.tokens ? writer_.debt(peer) : std::nullopt;
}

// --- Out ------------------------------------------------------------------------------------

// Stages up to the end of a chunk; own rows go to their places while they are in cache.
bool Dispatch::stage() {
  if (token_ == tokens_.tokens) return writer_.flush();
  bool any = false;
  while (token_ < tokens_.tokens && writer_.has_room()) {
    any = true;
    if (piece_ == 0) keep(token_);
    if (!token_ranks_.any_but(token_, exchange_.rank())) {
      ++token_;
      continue;
    }
    stage_record(token_);
    if (++piece_ == layout_.pieces) {
      piece_ = 0;
      ++token_;
    }
    if (writer_.at_chunk_end()) break;
  }
  return any;
}

void Dispatch::stage_record(int32_t token) {
  const Record record = writer_.next();
  record.head() = RecordHead{token, piece_};
  const int64_t lanes = int64_t{token} * plan_.top_k;
  if (layout_.record.ids > 0) {
    std::transform(tokens_.topk_idx + lanes, tokens_.topk_idx + lanes + plan_.top_k, record.ids(),
                   [](int64_t expert) { return static_cast<int16_t>(expert); });
  }
  if (layout_.record.weights > 0) {
    std::copy_n(tokens_.topk_weights + lanes, plan_.top_k, record.weights(layout_.record));
  }
  const uint32_t* scales = tokens_.scales + token * tokens_.scale_token_stride;
  uint32_t* staged_scales = record.scales(layout_.record);
  for (int32_t word = 0; word < tokens_.scale_words; ++word) {
    staged_scales[word] = scales[word * tokens_.scale_word_stride];
  }
  const int64_t offset = piece_ * layout_.record.piece_bytes;
  const int64_t bytes = std::min(layout_.record.piece_bytes, tokens_.row_bytes - offset);
  std::memcpy(record.payload, tokens_.rows + token * tokens_.row_bytes + offset, size_of(bytes));
  writer_.advance();
}

// An own token for own experts needs no stream.
void Dispatch::keep(int32_t token) {
  const int32_t me = exchange_.rank();
  if (plan_.is_token_in_rank[int64_t{token} * exchange_.ranks() + me] == 0) return;
  const int64_t lanes = int64_t{token} * plan_.top_k;
  const float* weights = tokens_.topk_weights + lanes;
  if (first_rows_ != nullptr) {
    std::transform(tokens_.topk_idx + lanes, tokens_.topk_idx + lanes + plan_.top_k, ids_.begin(),
                   [](int64_t expert) { return static_cast<int16_t>(expert); });
  }
  const Origin origin{me, token};
  const uint32_t* scales = tokens_.scales + token * tokens_.scale_token_stride;
  deliver(admit(origin, ids_.data(), weights), origin,
          Piece{tokens_.rows + token * tokens_.row_bytes, 0, tokens_.row_bytes, scales,
                tokens_.scale_word_stride});
}

// --- In -------------------------------------------------------------------------------------

bool Dispatch::take(StreamReader& reader) {
  bool any = false;
  Arrivals& arrivals = arrivals_[size_of(reader.peer())];
  while (reader.arrived()) {
    any = true;
    const Record record = reader.next();
    accept(Origin{reader.peer(), record.head().token}, record, arrivals);
    reader.advance();
    if (reader.at_chunk_end()) break;
  }
  return any;
}

bool Dispatch::is_mine(const Record& record, const Arrivals& arrivals) const {
  if (first_rows_ == nullptr) {
    return arrivals.next < arrivals.end && plan_.source_token[arrivals.next] == record.head().token;
  }
  const int16_t* ids = record.ids();
  return std::any_of(ids, ids + plan_.top_k, [&](int16_t expert) {
    return expert >= first_expert_ && expert < first_expert_ + locals_;
  });
}

void Dispatch::accept(Origin origin, const Record& record, Arrivals& arrivals) {
  const int32_t number = record.head().piece;
  if (number == 0) {
    arrivals.current = -1;
    if (!is_mine(record, arrivals)) return;
    const float* weights = layout_.record.weights > 0 ? record.weights(layout_.record) : nullptr;
    arrivals.current = admit(origin, record.ids(), weights);
  }
  if (arrivals.current < 0) return;
  const int64_t offset = number * layout_.record.piece_bytes;
  const int64_t bytes = std::min(layout_.record.piece_bytes, tokens_.row_bytes - offset);
  deliver(arrivals.current, origin,
          Piece{record.payload, offset, bytes, record.scales(layout_.record), 1});
  arrivals.complete = number + 1 == layout_.pieces;
}

// The number of the row that `origin` becomes. For a new routing, writes the plan's entries.
int64_t Dispatch::admit(Origin origin, const int16_t* ids, const float* weights) {
  Arrivals& arrivals = arrivals_[size_of(origin.rank)];
  const int64_t n = arrivals.next++;
  if (first_rows_ == nullptr) return n;
  const int64_t lanes = n * plan_.top_k;
  bool fits = n < arrivals.end;
  if (fits) plan_.source_token[n] = origin.token;
  for (int32_t k = 0; k < plan_.top_k && fits; ++k) {
    const int32_t local = ids[k] - first_expert_;
    const bool mine = local >= 0 && local < locals_;
    plan_.topk_idx[lanes + k] = mine ? local : -1;
    if (plan_.topk_weights != nullptr) plan_.topk_weights[lanes + k] = mine ? weights[k] : 0.0f;
    if (!mine) {
      plan_.rows_of[lanes + k] = -1;
      continue;
    }
    const auto first = std::find(ids, ids + k, ids[k]) - ids;
    int64_t& next_row = next_rows_[size_of(int64_t{origin.rank} * locals_ + local)];
    const int64_t row = first < k ? plan_.rows_of[lanes + first] : next_row++;
    fits = row < plan_.offsets[locals_];
    plan_.rows_of[lanes + k] = static_cast<int32_t>(row);
  }
  if (fits) return n;
  const std::string reason = "the routing of rank " + std::to_string(origin.rank) +
                             " changed while its dispatch was running";
  exchange_.refuse(reason);
  throw Misuse(reason);
}

void Dispatch::deliver(int64_t n, Origin origin, const Piece& piece) {
  if (!into_.expert_major) {
    put(n, origin, piece);
    return;
  }
  const int64_t lanes = n * plan_.top_k;
  const int32_t* rows = plan_.rows_of + lanes;
  const bool weighted = into_.row_weights != nullptr && piece.offset == 0;
  for (int32_t k = 0; k < plan_.top_k; ++k) {
    if (rows[k] < 0) continue;
    const bool again = repeated(rows, k);
    if (!again) put(rows[k], origin, piece);
    if (!weighted) continue;
    const float weight = plan_.topk_weights[lanes + k];
    into_.row_weights[rows[k]] = again ? into_.row_weights[rows[k]] + weight : weight;
  }
}

void Dispatch::put(int64_t row, Origin origin, const Piece& piece) {
  copy_(into_.rows + row * tokens_.row_bytes + piece.offset, piece.payload, piece.bytes);
  if (piece.offset != 0) return;
  uint32_t* scales = into_.scales + row * tokens_.scale_words;
  for (int32_t word = 0; word < tokens_.scale_words; ++word) {
    scales[word] = piece.scales[word * piece.scale_stride];
  }
  into_.row_source_rank[row] = origin.rank;
  into_.row_source_token[row] = origin.token;
}

// --- What no token fills --------------------------------------------------------------------

void Dispatch::blank(int64_t row) {
  std::memset(into_.rows + row * tokens_.row_bytes, 0, size_of(tokens_.row_bytes));
  std::fill_n(into_.scales + row * tokens_.scale_words, tokens_.scale_words, 0u);
  if (into_.row_weights != nullptr) into_.row_weights[row] = 0.0f;
  into_.row_source_rank[row] = -1;
  into_.row_source_token[row] = -1;
}

void Dispatch::blank_padding() {
  const auto blank_from = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) blank(row);
  };
  if (!into_.expert_major) {
    blank_from(plan_.received, into_.capacity);
    return;
  }
  for (int32_t e = 0; e < locals_; ++e) {
    blank_from(plan_.offsets[e] + plan_.tokens_per_expert[e], plan_.offsets[e + 1]);
  }
  blank_from(plan_.offsets[locals_], into_.capacity);
}

// The rows of a source that was masked before they arrived: as if they had never been sent, in
// places that stay empty.
void Dispatch::blank_missing(int32_t source) {
  const Arrivals& arrivals = arrivals_[size_of(source)];
  const int64_t begin = arrivals.complete ? arrivals.next : arrivals.next - 1;
  for (int64_t n = begin; n < arrivals.end; ++n) {
    int32_t* rows = plan_.rows_of + n * plan_.top_k;
    const bool placed = first_rows_ == nullptr || n < arrivals.next;
    for (int32_t k = 0; k < plan_.top_k && into_.expert_major && placed; ++k) {
      if (rows[k] >= 0) blank(rows[k]);
    }
    if (!into_.expert_major) blank(n);
    if (first_rows_ == nullptr) continue;
    plan_.source_token[n] = -1;
    std::fill_n(rows, plan_.top_k, -1);
    std::fill_n(plan_.topk_idx + n * plan_.top_k, plan_.top_k, int64_t{-1});
    if (plan_.topk_weights == nullptr) continue;
    std::fill_n(plan_.topk_weights + n * plan_.top_k, plan_.top_k, 0.0f);
  }
  for (int32_t e = 0; e < locals_ && into_.expert_major && first_rows_ != nullptr; ++e) {
    const bool last = source + 1 == exchange_.ranks();
    const int64_t end = last ? plan_.offsets[e] + plan_.tokens_per_expert[e]
                             : (*first_rows_)[size_of((int64_t{source} + 1) * locals_ + e)];
    const int64_t first = next_rows_[size_of(int64_t{source} * locals_ + e)];
    for (int64_t row = first; row < end; ++row) blank(row);
  }
}

void Dispatch::check_complete() {
  for (int32_t source = 0; source < exchange_.ranks(); ++source) {
    const Arrivals& arrivals = arrivals_[size_of(source)];
    if (arrivals.next == arrivals.end && arrivals.complete) continue;
    if (!exchange_.present(source)) {
      blank_missing(source);
      continue;
    }
    throw BadArgument("plan",
                      "one by which rank " + std::to_string(source) + " sends " +
                          std::to_string(arrivals.end) + " rows",
                      "the plan of the same dispatch on all ranks");
  }
}

}  // namespace fanfold
