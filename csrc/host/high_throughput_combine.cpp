#include "host/high_throughput_combine.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace fanfold {
namespace {

size_t size_of(int64_t value) { return static_cast<size_t>(value); }

}  // namespace

int64_t combine_ring_bytes(const Exchange& exchange) {
  return exchange.staging_bytes() / exchange.ranks() / kAreaAlignment * kAreaAlignment;
}

StreamLayout combine_stream(const HighThroughputOutputs& outputs, int32_t top_k,
                            int64_t ring_bytes) {
  const int32_t lanes = outputs.lanes ? top_k : 0;
  return StreamLayout::of(ring_bytes, int64_t{2} * outputs.hidden, RecordLayout{0, lanes, 0, 0});
}

Combine::Combine(Exchange& exchange, const StreamLayout& layout,
                 const HighThroughputOutputs& outputs, const HighThroughputPlan& plan,
                 const HighThroughputResult& result)
    : exchange_(exchange), layout_(layout), outputs_(outputs), plan_(plan), result_(result),
      own_row_(size_of(layout.record.piece_bytes / 2)) {
  const int64_t ring_bytes = combine_ring_bytes(exchange);
  for (int32_t peer = 0; peer < exchange.ranks(); ++peer) {
    const int64_t begin = peer == 0 ? 0 : plan.source_prefix[peer - 1];
    const int64_t end = plan.source_prefix[peer];
    departures_.push_back(Departures{begin, end});
    const bool own = peer == exchange.rank();
    writers_.emplace_back(exchange, layout, exchange.staging(exchange.rank()) + peer * ring_bytes,
                          own ? std::vector<int32_t>{} : std::vector<int32_t>{peer},
                          own ? 0 : (end - begin) * layout.pieces);
    readers_.emplace_back(exchange, layout, exchange.staging(peer) + exchange.rank() * ring_bytes,
                          peer);
  }
}

void Combine::run(const std::vector<int64_t>& expected_rows) {
  open_announced(exchange_, readers_, &expected_rows);
  while (!finished()) {
    bool progress = false;
    // Every rank begins with the next one, so that they do not all serve rank 0 first.
    for (int32_t step = 1; step <= exchange_.ranks(); ++step) {
      progress |= send((exchange_.rank() + step) % exchange_.ranks());
    }
    progress |= fold();
    if (!progress && !finished()) {
      for (StreamReader& reader : readers_) reader.acknowledge();
      exchange_.wait([&] { return ready(); }, [&](int32_t peer) { return debt(peer); });
    }
    open_announced(exchange_, readers_, &expected_rows);
  }
  exchange_.leave();
}

bool Combine::finished() const {
  for (int32_t peer = 0; peer < exchange_.ranks(); ++peer) {
    const bool sent =
        peer == exchange_.rank() || !exchange_.present(peer) || writers_[size_of(peer)].closed();
    if (!sent || !readers_[size_of(peer)].complete()) return false;
  }
  return token_ == plan_.tokens;
}

bool Combine::ready() {
  if (exchange_.news() || finished()) return true;
  if (token_ < plan_.tokens && all_arrived()) return true;
  for (int32_t peer = 0; peer < exchange_.ranks(); ++peer) {
    const Departures& departures = departures_[size_of(peer)];
    const bool sending = peer != exchange_.rank() && departures.next < departures.end;
    if (sending && writers_[size_of(peer)].has_room()) return true;
  }
  return false;
}

std::optional<Debt> Combine::debt(int32_t peer) const {
  if (const auto owed = exchange_.announcement_debt(peer)) return owed;
  if (const auto owed = readers_[size_of(peer)].debt()) return owed;
  const Departures& departures = departures_[size_of(peer)];
  return departures.next < departures.end ? writers_[size_of(peer)].debt(peer) : std::nullopt;
}

Combine::Columns Combine::columns_of(int32_t piece) const {
  const int64_t wide = layout_.record.piece_bytes / 2;
  const int64_t begin = piece * wide;
  return Columns{begin, std::min(wide, outputs_.hidden - begin)};
}

// --- Expert side ----------------------------------------------------------------------------

// Stages rows for `source` up to the end of a chunk.
bool Combine::send(int32_t source) {
  if (source == exchange_.rank() || !exchange_.present(source)) return false;
  StreamWriter& writer = writers_[size_of(source)];
  Departures& departures = departures_[size_of(source)];
  if (departures.next == departures.end) return writer.flush();
  bool any = false;
  while (departures.next < departures.end && writer.has_room()) {
    any = true;
    const Record record = writer.next();
    const int64_t n = departures.next;
    record.head() = RecordHead{plan_.source_token[n], departures.piece};
    if (outputs_.hidden > 0) {
      stage(n, columns_of(departures.piece), reinterpret_cast<uint16_t*>(record.payload));
    }
    for (int32_t k = 0; k < layout_.record.weights; ++k) {
      record.weights(layout_.record)[k] = lane(n, k);
    }
    if (++departures.piece == layout_.pieces) {
      departures.piece = 0;
      ++departures.next;
    }
    writer.advance();
    if (writer.at_chunk_end()) break;
  }
  return any;
}

// What this rank's experts contribute to row n.
void Combine::stage(int64_t n, const Columns& columns, uint16_t* row) {
  const uint16_t* y = outputs_.y + columns.begin;
  if (!outputs_.expert_major) {
    std::memcpy(row, y + n * outputs_.hidden, size_of(columns.count) * sizeof *row);
    return;
  }
  gather(n, y, terms_);
  // What is likely staged next; a row in several pieces goes on with its next piece instead.
  next_terms_.clear();
  if (layout_.pieces == 1 && n + 1 < plan_.received) gather(n + 1, y, next_terms_);
  reduce_bf16(terms_, {}, columns.count, row, next_terms_);
}

// The outputs, in `y`, that row n is the sum of.
void Combine::gather(int64_t n, const uint16_t* y, std::vector<ReduceTerm>& terms) const {
  const int32_t* rows = plan_.rows_of + n * plan_.top_k;
  terms.clear();
  for (int32_t k = 0; k < plan_.top_k; ++k) {
    if (rows[k] < 0 || repeated(rows, k)) continue;
    const float weight = outputs_.row_weights == nullptr ? 1.0f : outputs_.row_weights[rows[k]];
    terms.push_back(ReduceTerm{y + int64_t{rows[k]} * outputs_.hidden, weight});
  }
}

float Combine::lane(int64_t n, int32_t k) const {
  const int64_t place = n * plan_.top_k + k;
  if (!outputs_.expert_major) return outputs_.lane_weights[place];
  const int32_t row = plan_.rows_of[place];
  return row < 0 ? 0.0f : outputs_.lane_weights[row];
}

// --- Source ---------------------------------------------------------------------------------

bool Combine::contributes(int32_t peer) const {
  return plan_.is_token_in_rank[int64_t{token_} * exchange_.ranks() + peer] != 0 &&
         (peer == exchange_.rank() || exchange_.present(peer));
}

bool Combine::all_arrived() const {
  return std::all_of(readers_.begin(), readers_.end(), [&](const StreamReader& reader) {
    const int32_t peer = reader.peer();
    return peer == exchange_.rank() || !contributes(peer) || reader.arrived();
  });
}

// Sums the tokens all of whose rows are there, but no more than a chunk before it is time to look
// after the own rows again.
bool Combine::fold() {
  int32_t folded = 0;
  while (folded < layout_.records && token_ < plan_.tokens && all_arrived()) {
    if (outputs_.lanes && piece_ == 0) fold_lanes();
    fold_piece();
    ++folded;
    if (++piece_ == layout_.pieces) {
      piece_ = 0;
      ++token_;
    }
  }
  return folded > 0;
}

// The next record of a stream, which both sides must take for the same token.
Record Combine::expect_record(StreamReader& reader) {
  const Record record = reader.next();
  if (record.head().token == token_ && record.head().piece == piece_) return record;
  exchange_.disagree("token of the plan", token_, record.head().token, reader.peer());
}

void Combine::fold_lanes() {
  float* weights = result_.weights + int64_t{token_} * plan_.top_k;
  std::fill_n(weights, plan_.top_k, 0.0f);
  for (int32_t peer = 0; peer < exchange_.ranks(); ++peer) {
    if (!contributes(peer)) continue;
    const bool own = peer == exchange_.rank();
    const float* lanes =
        own ? nullptr : expect_record(readers_[size_of(peer)]).weights(layout_.record);
    for (int32_t k = 0; k < plan_.top_k; ++k) {
      weights[k] += own ? lane(departures_[size_of(peer)].next, k) : lanes[k];
    }
  }
}

void Combine::fold_piece() {
  const Columns columns = columns_of(piece_);
  rank_terms_.clear();
  for (int32_t peer = 0; peer < exchange_.ranks(); ++peer) {
    if (!contributes(peer)) continue;
    if (peer == exchange_.rank()) {
      Departures& own = departures_[size_of(peer)];
      if (outputs_.hidden > 0) stage(own.next, columns, own_row_.data());
      if (piece_ + 1 == layout_.pieces) ++own.next;
      rank_terms_.push_back(ReduceTerm{own_row_.data(), 1.0f});
      continue;
    }
    const Record record = expect_record(readers_[size_of(peer)]);
    rank_terms_.push_back(ReduceTerm{reinterpret_cast<const uint16_t*>(record.payload), 1.0f});
  }
  if (outputs_.hidden > 0) {
    std::array<const uint16_t*, 2> bias{};
    size_t biases = 0;
    const int64_t place = int64_t{token_} * outputs_.hidden + columns.begin;
    for (const uint16_t* given : result_.bias) {
      if (given != nullptr) bias[biases++] = given + place;
    }
    reduce_bf16(rank_terms_, std::span(bias.data(), biases), columns.count, result_.out + place);
  }
  for (int32_t peer = 0; peer < exchange_.ranks(); ++peer) {
    if (peer != exchange_.rank() && contributes(peer)) readers_[size_of(peer)].advance();
  }
}

}  // namespace fanfold
