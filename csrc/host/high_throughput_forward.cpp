#include "host/high_throughput_forward.h"

#include <algorithm>

#include "host/stream_paths.h"

namespace fanfold {

Forward::Forward(Exchange& exchange, const StreamLayout& layout, LocalSums& sums, OutgoingRows& own,
                 int32_t source)
    : exchange_(exchange), layout_(layout), sums_(sums), own_(own), source_(source),
      writer_(exchange, layout, sums_to(exchange, source), 0),
      own_row_(static_cast<size_t>(layout.record.piece_bytes / 2)) {
  for (const int32_t peer : exchange.hosts().members(exchange.hosts().host_of(exchange.rank()))) {
    if (peer == exchange.rank()) continue;
    readers_.emplace_back(exchange, layout, rows_for(exchange, peer, source));
    readers_.back().open_until_end();
  }
}

// The source's header tells how many records it expects.
void Forward::open() {
  if (opened_ || !exchange_.header_received(source_)) return;
  opened_ = true;
  writer_.open(exchange_.header(source_).records);
}

bool Forward::finished() const {
  if (!present()) return true;
  return opened_ && writer_.closed() && std::ranges::all_of(readers_, &StreamReader::complete);
}

bool Forward::run() {
  if (!present()) return false;
  open();
  if (!opened_) return false;
  bool any = false;
  while (writer_.staged() < writer_.records() && writer_.has_room()) {
    const std::optional<int32_t> token = next_token();
    if (!token) break;
    any = true;
    const Record record = writer_.next();
    if (*token == kEndToken) {
      record.head() = RecordHead{kMissingToken, 0};
    } else {
      sum(*token, record);
    }
    writer_.advance();
    if (writer_.at_chunk_end()) break;
  }
  if (writer_.staged() < writer_.records()) return any;
  const std::optional<int32_t> surplus = next_token();  // reads the ends of the streams
  if (surplus && *surplus != kEndToken) {
    exchange_.disagree("records of rank " + std::to_string(source_) + " by the plans",
                       writer_.records() + 1, writer_.records(), source_);
  }
  return writer_.flush() || any;
}

bool Forward::ready() {
  if (!present()) return false;
  if (!opened_) return exchange_.header_received(source_);
  if (writer_.staged() == writer_.records()) {
    return std::ranges::any_of(readers_, &StreamReader::arrived);
  }
  return next_token().has_value() && writer_.has_room();
}

// The lowest token with a row on this host: nothing while a rank may still bring a lower one, and
// kEndToken behind the last.
std::optional<int32_t> Forward::next_token() {
  int32_t lowest = own_.left() ? sums_.plan().source_token[own_.next] : kEndToken;
  for (StreamReader& reader : readers_) {
    if (reader.ended() || !exchange_.present(reader.peer())) continue;
    if (!reader.arrived()) return std::nullopt;
    const int32_t token = reader.next().head().token;
    if (token == kEndToken) {
      reader.advance();
      reader.end();
      continue;
    }
    lowest = std::min(lowest, token);
  }
  return lowest;
}

bool Forward::own_has(int32_t token) const {
  return own_.left() && sums_.plan().source_token[own_.next] == token;
}

// Writes the sum of a token's rows to `record`, and moves on behind them.
void Forward::sum(int32_t token, const Record& record) {
  record.head() = RecordHead{token, piece_};
  float* weights = record.weights(layout_.record);
  std::fill_n(weights, layout_.record.weights, 0.0f);
  terms_.clear();
  const bool own = own_has(token);
  const auto add_own = [&] {
    sums_.write(own_.next, piece_, own_row_.data());
    terms_.push_back(ReduceTerm{own_row_.data(), 1.0f});
    for (int32_t k = 0; k < layout_.record.weights; ++k) {
      weights[k] += sums_.topk_weight(own_.next, k);
    }
  };
  bool own_added = !own;
  std::vector<StreamReader*> read;
  for (StreamReader& reader : readers_) {
    if (reader.ended() || !exchange_.present(reader.peer())) continue;
    const Record row = reader.next();
    if (row.head().token != token) continue;
    if (!own_added && reader.peer() > exchange_.rank()) {
      add_own();
      own_added = true;
    }
    terms_.push_back(ReduceTerm{reinterpret_cast<const uint16_t*>(row.payload), 1.0f});
    for (int32_t k = 0; k < layout_.record.weights; ++k) {
      weights[k] += row.weights(layout_.record)[k];
    }
    read.push_back(&reader);
  }
  if (!own_added) add_own();
  if (sums_.has_columns()) {
    reduce_bf16(terms_, {}, sums_.columns_of(piece_).count,
                reinterpret_cast<uint16_t*>(record.payload));
  }
  for (StreamReader* reader : read) reader->advance();
  const bool last = piece_ + 1 == layout_.pieces;
  if (own && last) ++own_.next;
  piece_ = last ? 0 : piece_ + 1;
}

std::optional<Pending> Forward::pending(int32_t peer) const {
  if (!present()) return std::nullopt;
  if (peer == source_) return writer_.pending(peer);
  const auto reader = std::ranges::find(readers_, peer, &StreamReader::peer);
  return reader == readers_.end() ? std::nullopt : reader->pending();
}

void Forward::acknowledge() {
  for (StreamReader& reader : readers_) reader.acknowledge();
}

}  // namespace fanfold
