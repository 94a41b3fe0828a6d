#include "host/high_throughput_dispatch.h"

#include <algorithm>
#include <cstring>

namespace fanfold {
namespace {

size_t size_of(int64_t value) { return static_cast<size_t>(value); }

}  // namespace

StreamLayout dispatch_stream(const HighThroughputTokens& tokens, bool routed, int64_t ring_bytes) {
  const int32_t ids = routed ? tokens.top_k : 0;
  const int32_t weights = routed && tokens.weighted ? tokens.top_k : 0;
  return StreamLayout::of(ring_bytes, tokens.row_bytes,
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
      ids_(size_of(plan.top_k)) {
  if (first_rows != nullptr) next_rows_ = *first_rows;
  for (int32_t host = 0; host < exchange.hosts().count(); ++host) {
    const std::vector<int32_t> readers = others_on(exchange, host);
    const int64_t records = token_ranks_.count_of(readers) * layout.pieces;
    outgoing_.push_back({.readers = readers,
                         .writer = {exchange, layout, dispatch_to(exchange, host), records},
                         .here = host == exchange.hosts().host_of(exchange.rank())});
  }
  for (int32_t source = 0; source < exchange.ranks(); ++source) {
    readers_.emplace_back(exchange, layout, dispatch_from(exchange, source));
    const int64_t begin = source == 0 ? 0 : plan.source_prefix[source - 1];
    incoming_.push_back(IncomingRows{begin, plan.source_prefix[source]});
  }
}

void Dispatch::run(const std::vector<int64_t>* expected_rows) {
  blank_padding();
  open_streams(exchange_, readers_, expected_rows);
  while (!finished()) {
    bool progress = false;
    for (Outgoing& outgoing : outgoing_) progress |= stage(outgoing);
    for (StreamReader& reader : readers_) progress |= receive(reader);
    if (!progress && !finished()) {
      for (StreamReader& reader : readers_) reader.acknowledge();
      exchange_.wait([&] { return ready(); }, [&](int32_t peer) { return pending(peer); });
    }
    open_streams(exchange_, readers_, expected_rows);
  }
  exchange_.leave();
  check_complete();
}

bool Dispatch::finished() const {
  return std::ranges::all_of(outgoing_,
                             [&](const Outgoing& outgoing) {
                               return !staging(outgoing) && outgoing.writer.closed();
                             }) &&
         std::ranges::all_of(readers_, &StreamReader::complete);
}

bool Dispatch::ready() {
  if (exchange_.has_unread_signal() || finished()) return true;
  return std::ranges::any_of(
             outgoing_,
             [&](Outgoing& outgoing) { return staging(outgoing) && outgoing.writer.has_room(); }) ||
         std::ranges::any_of(readers_, &StreamReader::arrived);
}

std::optional<Pending> Dispatch::pending(int32_t peer) const {
  if (const auto header = exchange_.pending_header(peer)) return header;
  if (const auto rows = readers_[size_of(peer)].pending()) return rows;
  const Outgoing& outgoing = outgoing_[size_of(exchange_.hosts().host_of(peer))];
  return staging(outgoing) ? outgoing.writer.pending(peer) : std::nullopt;
}

// --- Sending --------------------------------------------------------------------------------

// Stages tokens up to the end of a chunk, and copies rows for own experts while they are in cache.
bool Dispatch::stage(Outgoing& outgoing) {
  if (!staging(outgoing)) return outgoing.writer.flush();
  bool any = false;
  while (staging(outgoing) && outgoing.writer.has_room()) {
    any = true;
    if (outgoing.here && outgoing.piece == 0) deliver_own(outgoing.token);
    if (!token_ranks_.any_of(outgoing.token, outgoing.readers)) {
      ++outgoing.token;
      continue;
    }
    stage_record(outgoing);
    if (++outgoing.piece == layout_.pieces) {
      outgoing.piece = 0;
      ++outgoing.token;
    }
    if (outgoing.writer.at_chunk_end()) break;
  }
  return any;
}

void Dispatch::stage_record(Outgoing& outgoing) {
  const int32_t token = outgoing.token;
  const Record record = outgoing.writer.next();
  record.head() = RecordHead{token, outgoing.piece};
  const int64_t slots = int64_t{token} * plan_.top_k;
  if (layout_.record.ids > 0) {
    std::transform(tokens_.topk_idx + slots, tokens_.topk_idx + slots + plan_.top_k, record.ids(),
                   [](int64_t expert) { return static_cast<int16_t>(expert); });
  }
  if (layout_.record.weights > 0) {
    std::copy_n(tokens_.topk_weights + slots, plan_.top_k, record.weights(layout_.record));
  }
  const uint32_t* scales = tokens_.scales + token * tokens_.scale_token_stride;
  uint32_t* staged_scales = record.scales(layout_.record);
  for (int32_t word = 0; word < tokens_.scale_words; ++word) {
    staged_scales[word] = scales[word * tokens_.scale_word_stride];
  }
  const int64_t offset = outgoing.piece * layout_.record.piece_bytes;
  const int64_t bytes = std::min(layout_.record.piece_bytes, tokens_.row_bytes - offset);
  std::memcpy(record.payload, tokens_.rows + token * tokens_.row_bytes + offset, size_of(bytes));
  outgoing.writer.advance();
}

// Delivers an own token to own experts without a stream.
void Dispatch::deliver_own(int32_t token) {
  const int32_t me = exchange_.rank();
  if (plan_.is_token_in_rank[int64_t{token} * exchange_.ranks() + me] == 0) return;
  const int64_t slots = int64_t{token} * plan_.top_k;
  const float* weights = tokens_.topk_weights + slots;
  if (first_rows_ != nullptr) {
    std::transform(tokens_.topk_idx + slots, tokens_.topk_idx + slots + plan_.top_k, ids_.begin(),
                   [](int64_t expert) { return static_cast<int16_t>(expert); });
  }
  const Origin origin{me, token};
  const uint32_t* scales = tokens_.scales + token * tokens_.scale_token_stride;
  deliver(assign_row(origin, ids_.data(), weights), origin,
          Piece{tokens_.rows + token * tokens_.row_bytes, 0, tokens_.row_bytes, scales,
                tokens_.scale_word_stride});
}

// --- Receiving ------------------------------------------------------------------------------

bool Dispatch::receive(StreamReader& reader) {
  bool any = false;
  IncomingRows& incoming = incoming_[size_of(reader.peer())];
  while (reader.arrived()) {
    any = true;
    const Record record = reader.next();
    receive_record(Origin{reader.peer(), record.head().token}, record, incoming);
    reader.advance();
    if (reader.at_chunk_end()) break;
  }
  return any;
}

bool Dispatch::is_mine(const Record& record, const IncomingRows& incoming) const {
  if (first_rows_ == nullptr) {
    return incoming.next < incoming.end && plan_.source_token[incoming.next] == record.head().token;
  }
  const int16_t* ids = record.ids();
  return std::any_of(ids, ids + plan_.top_k, [&](int16_t expert) {
    return expert >= first_expert_ && expert < first_expert_ + locals_;
  });
}

void Dispatch::receive_record(Origin origin, const Record& record, IncomingRows& incoming) {
  const int32_t number = record.head().piece;
  if (number == 0) {
    incoming.current = -1;
    if (!is_mine(record, incoming)) return;
    const float* weights = layout_.record.weights > 0 ? record.weights(layout_.record) : nullptr;
    incoming.current = assign_row(origin, record.ids(), weights);
  }
  if (incoming.current < 0) return;
  const int64_t offset = number * layout_.record.piece_bytes;
  const int64_t bytes = std::min(layout_.record.piece_bytes, tokens_.row_bytes - offset);
  deliver(incoming.current, origin,
          Piece{record.payload, offset, bytes, record.scales(layout_.record), 1});
  incoming.complete = number + 1 == layout_.pieces;
}

// Returns the number of the received row of `origin`. For a new routing, also writes the row's
// entries of the plan.
int64_t Dispatch::assign_row(Origin origin, const int16_t* ids, const float* weights) {
  IncomingRows& incoming = incoming_[size_of(origin.rank)];
  const int64_t n = incoming.next++;
  if (first_rows_ == nullptr) return n;
  const int64_t slots = n * plan_.top_k;
  bool fits = n < incoming.end;
  if (fits) plan_.source_token[n] = origin.token;
  for (int32_t k = 0; k < plan_.top_k && fits; ++k) {
    const int32_t local = ids[k] - first_expert_;
    const bool mine = local >= 0 && local < locals_;
    plan_.topk_idx[slots + k] = mine ? local : -1;
    if (plan_.topk_weights != nullptr) plan_.topk_weights[slots + k] = mine ? weights[k] : 0.0f;
    if (!mine) {
      plan_.rows_of[slots + k] = -1;
      continue;
    }
    const auto first = std::find(ids, ids + k, ids[k]) - ids;
    int64_t& next_row = next_rows_[size_of(int64_t{origin.rank} * locals_ + local)];
    const int64_t row = first < k ? plan_.rows_of[slots + first] : next_row++;
    fits = row < plan_.offsets[locals_];
    plan_.rows_of[slots + k] = static_cast<int32_t>(row);
  }
  if (fits) return n;
  const std::string reason = "the routing of rank " + std::to_string(origin.rank) +
                             " changed while its dispatch was running";
  exchange_.refuse(reason);
  throw Misuse(reason);
}

void Dispatch::deliver(int64_t n, Origin origin, const Piece& piece) {
  if (!into_.expert_major) {
    copy_piece(n, origin, piece);
    return;
  }
  const int64_t slots = n * plan_.top_k;
  const int32_t* rows = plan_.rows_of + slots;
  const bool weighted = into_.row_weights != nullptr && piece.offset == 0;
  for (int32_t k = 0; k < plan_.top_k; ++k) {
    if (rows[k] < 0) continue;
    const bool again = repeated(rows, k);
    if (!again) copy_piece(rows[k], origin, piece);
    if (!weighted) continue;
    const float weight = plan_.topk_weights[slots + k];
    into_.row_weights[rows[k]] = again ? into_.row_weights[rows[k]] + weight : weight;
  }
}

void Dispatch::copy_piece(int64_t row, Origin origin, const Piece& piece) {
  copy_(into_.rows + row * tokens_.row_bytes + piece.offset, piece.payload, piece.bytes);
  if (piece.offset != 0) return;
  uint32_t* scales = into_.scales + row * tokens_.scale_words;
  for (int32_t word = 0; word < tokens_.scale_words; ++word) {
    scales[word] = piece.scales[word * piece.scale_stride];
  }
  into_.row_source_rank[row] = origin.rank;
  into_.row_source_token[row] = origin.token;
}

// --- Unused rows ----------------------------------------------------------------------------

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

// If this rank masks a source, or its gateway here, before all of its rows have arrived: clears the
// missing rows, and removes them from a new plan. The rows of other sources keep their positions.
void Dispatch::blank_missing(int32_t source) {
  const IncomingRows& incoming = incoming_[size_of(source)];
  const int64_t begin = incoming.complete ? incoming.next : incoming.next - 1;
  for (int64_t n = begin; n < incoming.end; ++n) {
    int32_t* rows = plan_.rows_of + n * plan_.top_k;
    const bool placed = first_rows_ == nullptr || n < incoming.next;
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
    const IncomingRows& incoming = incoming_[size_of(source)];
    if (incoming.next == incoming.end && incoming.complete) continue;
    if (readers_[size_of(source)].lost()) {
      blank_missing(source);
      continue;
    }
    throw BadArgument("plan",
                      "one by which rank " + std::to_string(source) + " sends " +
                          std::to_string(incoming.end) + " rows",
                      "the plan of the same dispatch on all ranks");
  }
}

}  // namespace fanfold
