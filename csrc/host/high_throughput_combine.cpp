#include "host/high_throughput_combine.h"

#include <algorithm>
#include <array>

namespace fanfold {
namespace {

size_t size_of(int64_t value) { return static_cast<size_t>(value); }

}  // namespace

StreamLayout combine_stream(const HighThroughputOutputs& outputs, int32_t top_k,
                            int64_t ring_bytes) {
  const int32_t weights = outputs.weighted ? top_k : 0;
  return StreamLayout::of(ring_bytes, int64_t{2} * outputs.hidden, RecordLayout{0, weights, 0, 0});
}

Combine::Combine(Exchange& exchange, const StreamLayout& layout,
                 const HighThroughputOutputs& outputs, const HighThroughputPlan& plan,
                 const HighThroughputResult& result)
    : exchange_(exchange), layout_(layout), outputs_(outputs), plan_(plan), result_(result),
      sums_(layout, outputs, plan), own_row_(size_of(layout.record.piece_bytes / 2)) {
  add_sources();
  add_contributors();
}

void Combine::add_sources() {
  for (int32_t source = 0; source < exchange_.ranks(); ++source) {
    const int64_t begin = source == 0 ? 0 : plan_.source_prefix[source - 1];
    outgoing_.push_back(OutgoingRows{begin, plan_.source_prefix[source]});
    int64_t records = 0;
    if (sends_to(source)) {
      // A gateway does not know how many rows the source has here: a record tells it the end.
      records =
          (outgoing_.back().end - begin) * layout_.pieces + (exchange_.is_here(source) ? 0 : 1);
    }
    writers_.emplace_back(exchange_, layout_, rows_to(exchange_, source), records);
  }
  for (const int32_t source : exchange_.hosts().served_by(exchange_.rank())) {
    forwards_.emplace_back(exchange_, layout_, sums_, outgoing_[size_of(source)], source);
  }
}

void Combine::add_contributors() {
  const Hosts& hosts = exchange_.hosts();
  const TokenRanks token_ranks{plan_.is_token_in_rank, plan_.tokens, exchange_.ranks()};
  for (int32_t rank = 0; rank < exchange_.ranks(); ++rank) {
    const int32_t host = hosts.host_of(rank);
    if (exchange_.is_here(rank)) {
      contributors_.push_back({rank, {rank}});
      readers_.emplace_back(exchange_, layout_, rows_from(exchange_, rank));
    } else if (hosts.members(host).front() == rank) {
      const IncomingPath path = sums_from(exchange_, host);
      contributors_.push_back({path.peer, hosts.members(host)});
      readers_.emplace_back(exchange_, layout_, path);
      readers_.back().open(token_ranks.count_of(hosts.members(host)) * layout_.pieces);
    }
  }
}

void Combine::run(const std::vector<int64_t>& expected_rows) {
  open_streams(exchange_, readers_, &expected_rows);
  while (!finished()) {
    bool progress = false;
    // Each rank begins with its successor, so that not all ranks serve rank 0 first.
    for (int32_t step = 1; step <= exchange_.ranks(); ++step) {
      progress |= send((exchange_.rank() + step) % exchange_.ranks());
    }
    for (Forward& forward : forwards_) progress |= forward.run();
    progress |= sum_tokens();
    if (!progress && !finished()) {
      for (StreamReader& reader : readers_) reader.acknowledge();
      for (Forward& forward : forwards_) forward.acknowledge();
      exchange_.wait([&] { return ready(); }, [&](int32_t peer) { return pending(peer); });
    }
    open_streams(exchange_, readers_, &expected_rows);
  }
  exchange_.leave();
}

bool Combine::finished() const {
  for (int32_t peer = 0; peer < exchange_.ranks(); ++peer) {
    const bool sends = sends_to(peer) && exchange_.present(peer);
    if (sends && !writers_[size_of(peer)].closed()) return false;
  }
  return token_ == plan_.tokens && std::ranges::all_of(readers_, &StreamReader::complete) &&
         std::ranges::all_of(forwards_, &Forward::finished);
}

bool Combine::ready() {
  if (exchange_.has_unread_signal() || finished()) return true;
  if (token_ < plan_.tokens && all_arrived()) return true;
  if (token_ == plan_.tokens && std::ranges::any_of(readers_, &StreamReader::arrived)) return true;
  for (int32_t peer = 0; peer < exchange_.ranks(); ++peer) {
    StreamWriter& writer = writers_[size_of(peer)];
    if (sends_to(peer) && writer.staged() < writer.records() && writer.has_room()) return true;
  }
  return std::ranges::any_of(forwards_, &Forward::ready);
}

std::optional<Pending> Combine::pending(int32_t peer) const {
  if (const auto header = exchange_.pending_header(peer)) return header;
  const auto reader = std::ranges::find(readers_, peer, &StreamReader::peer);
  if (reader != readers_.end()) {
    if (const auto rows = reader->pending()) return rows;
  }
  for (const Forward& forward : forwards_) {
    if (const auto rows = forward.pending(peer)) return rows;
  }
  for (const StreamWriter& writer : writers_) {
    if (writer.staged() == writer.records()) continue;
    if (const auto room = writer.pending(peer)) return room;
  }
  return std::nullopt;
}

// --- Expert side ----------------------------------------------------------------------------

// Whether rows for `source` leave this rank in a stream: to the source, or to its gateway here. As
// the gateway itself, this rank sums them where they are.
bool Combine::sends_to(int32_t source) const {
  if (source == exchange_.rank()) return false;
  const int32_t host = exchange_.hosts().host_of(exchange_.rank());
  return exchange_.is_here(source) || exchange_.hosts().gateway(source, host) != exchange_.rank();
}

// Stages rows for `source` up to the end of a chunk.
bool Combine::send(int32_t source) {
  if (!sends_to(source) || !exchange_.present(source)) return false;
  StreamWriter& writer = writers_[size_of(source)];
  OutgoingRows& outgoing = outgoing_[size_of(source)];
  bool any = false;
  while (outgoing.left() && writer.has_room()) {
    any = true;
    const Record record = writer.next();
    const int64_t n = outgoing.next;
    record.head() = RecordHead{plan_.source_token[n], outgoing.piece};
    sums_.write(n, outgoing.piece, reinterpret_cast<uint16_t*>(record.payload));
    for (int32_t k = 0; k < layout_.record.weights; ++k) {
      record.weights(layout_.record)[k] = sums_.topk_weight(n, k);
    }
    if (++outgoing.piece == layout_.pieces) {
      outgoing.piece = 0;
      ++outgoing.next;
    }
    writer.advance();
    if (writer.at_chunk_end()) return true;
  }
  if (outgoing.left()) return any;
  if (writer.staged() < writer.records() && writer.has_room()) {
    writer.next().head() = RecordHead{kEndToken, 0};
    writer.advance();
    return true;
  }
  return writer.flush() || any;
}

// --- Source ---------------------------------------------------------------------------------

bool Combine::contributes(const Contributor& contributor) const {
  if (contributor.peer != exchange_.rank() && !exchange_.present(contributor.peer)) return false;
  const TokenRanks token_ranks{plan_.is_token_in_rank, plan_.tokens, exchange_.ranks()};
  return token_ranks.any_of(token_, contributor.members);
}

bool Combine::all_arrived() const {
  for (size_t i = 0; i < readers_.size(); ++i) {
    if (contributors_[i].peer == exchange_.rank() || readers_[i].arrived()) continue;
    if (contributes(contributors_[i])) return false;
  }
  return true;
}

// Sums the tokens whose rows have all arrived, at most a chunk of them before the caller sends rows
// again.
bool Combine::sum_tokens() {
  int32_t summed = 0;
  while (summed < layout_.records && token_ < plan_.tokens && all_arrived()) {
    if (outputs_.weighted && piece_ == 0) sum_topk_weights();
    sum_piece();
    ++summed;
    if (++piece_ == layout_.pieces) {
      piece_ = 0;
      ++token_;
    }
  }
  return (token_ == plan_.tokens && skip_missing()) || summed > 0;
}

// Reads the records in place of those that gateways could not send.
bool Combine::skip_missing() {
  bool any = false;
  for (StreamReader& reader : readers_) {
    for (; reader.arrived(); reader.advance()) {
      any = true;
      const int32_t token = reader.next().head().token;
      if (token == kMissingToken && !exchange_.is_here(reader.peer())) continue;
      exchange_.disagree("token of the plan", plan_.tokens, token, reader.peer());
    }
  }
  return any;
}

// Returns the next record of a stream; nothing if a gateway could not send it. Refuses the call if
// the plans of the two ranks disagree about its token.
std::optional<Record> Combine::expect_record(StreamReader& reader) {
  const Record record = reader.next();
  const RecordHead& head = record.head();
  if (head.token == token_ && head.piece == piece_) return record;
  const bool missing = head.token == kMissingToken || head.token > token_;
  if (missing && !exchange_.is_here(reader.peer())) return std::nullopt;
  exchange_.disagree("token of the plan", token_, head.token, reader.peer());
}

void Combine::sum_topk_weights() {
  float* weights = result_.weights + int64_t{token_} * plan_.top_k;
  std::fill_n(weights, plan_.top_k, 0.0f);
  for (size_t i = 0; i < contributors_.size(); ++i) {
    if (!contributes(contributors_[i])) continue;
    const bool own = contributors_[i].peer == exchange_.rank();
    const std::optional<Record> record = own ? std::nullopt : expect_record(readers_[i]);
    if (!own && !record) continue;
    const float* sent = own ? nullptr : record->weights(layout_.record);
    for (int32_t k = 0; k < plan_.top_k; ++k) {
      weights[k] += own ? sums_.topk_weight(outgoing_[size_of(exchange_.rank())].next, k) : sent[k];
    }
  }
}

void Combine::sum_piece() {
  const LocalSums::Columns columns = sums_.columns_of(piece_);
  rank_terms_.clear();
  summed_.clear();
  for (size_t i = 0; i < contributors_.size(); ++i) {
    if (!contributes(contributors_[i])) continue;
    if (contributors_[i].peer == exchange_.rank()) {
      OutgoingRows& own = outgoing_[size_of(exchange_.rank())];
      sums_.write(own.next, piece_, own_row_.data());
      if (piece_ + 1 == layout_.pieces) ++own.next;
      rank_terms_.push_back(ReduceTerm{own_row_.data(), 1.0f});
      continue;
    }
    const std::optional<Record> record = expect_record(readers_[i]);
    if (!record) continue;
    rank_terms_.push_back(ReduceTerm{reinterpret_cast<const uint16_t*>(record->payload), 1.0f});
    summed_.push_back(&readers_[i]);
  }
  if (sums_.has_columns()) {
    std::array<const uint16_t*, 2> bias{};
    size_t biases = 0;
    const int64_t place = int64_t{token_} * outputs_.hidden + columns.begin;
    for (const uint16_t* given : result_.bias) {
      if (given != nullptr) bias[biases++] = given + place;
    }
    reduce_bf16(rank_terms_, std::span(bias.data(), biases), columns.count, result_.out + place);
  }
  for (StreamReader* reader : summed_) reader->advance();
}

}  // namespace fanfold
