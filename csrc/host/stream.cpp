#include "host/stream.h"

#include <algorithm>
#include <utility>

namespace fanfold {

StreamWriter::StreamWriter(Exchange& exchange, const StreamLayout& layout, std::byte* ring,
                           std::vector<int32_t> readers, int64_t records)
    : exchange_(exchange), layout_(layout), ring_(ring), readers_(std::move(readers)),
      records_(records) {}

bool StreamWriter::has_room() {
  const int64_t chunk = staged_ / layout_.records;
  if (chunk - taken_by_all_ < layout_.chunks) return true;
  int32_t taken = kLeft;
  for (const int32_t reader : readers_) {
    if (exchange_.present(reader)) taken = std::min(taken, exchange_.taken(reader));
  }
  taken_by_all_ = taken;
  return chunk - taken_by_all_ < layout_.chunks;
}

int32_t StreamWriter::complete_chunks() const {
  const bool whole = staged_ == records_;
  return static_cast<int32_t>(whole ? ceil_div(staged_, layout_.records)
                                    : staged_ / layout_.records);
}

void StreamWriter::advance() {
  ++staged_;
  flush();
}

bool StreamWriter::flush() {
  if (closed_) return false;
  int32_t chunks = complete_chunks();
  const bool last = staged_ == records_;
  const bool closing = last && exchange_.agreed();
  if (last && !closing) --chunks;
  if (chunks <= published_ && !closing) return false;
  for (const int32_t reader : readers_) {
    if (exchange_.present(reader)) exchange_.publish(reader, chunks);
  }
  published_ = chunks;
  closed_ = closing;
  return true;
}

std::optional<Debt> StreamWriter::debt(int32_t reader) const {
  if (std::find(readers_.begin(), readers_.end(), reader) == readers_.end()) return std::nullopt;
  const int64_t needed = staged_ / layout_.records - layout_.chunks + 1;
  const int64_t taken = exchange_.taken(reader);
  if (staged_ == records_ || taken >= needed) return std::nullopt;
  return Debt{needed * layout_.records, taken * layout_.records};
}

StreamReader::StreamReader(Exchange& exchange, const StreamLayout& layout, const std::byte* ring,
                           int32_t peer)
    : exchange_(exchange), layout_(layout), ring_(ring), peer_(peer) {}

void StreamReader::open(int64_t records) { records_ = records; }

bool StreamReader::arrived() const {
  return opened() && read_ < records_ &&
         read_ < exchange_.published(peer_) * int64_t{layout_.records};
}

void StreamReader::advance() {
  ++read_;
  // Often enough that the writer never runs out of room for want of a word.
  const auto taken = static_cast<int32_t>(read_ / layout_.records);
  if (taken - acknowledged_ >= std::max(1, layout_.chunks / 4)) acknowledge();
}

void StreamReader::acknowledge() {
  const auto taken = static_cast<int32_t>(read_ / layout_.records);
  if (taken == acknowledged_ || read_ == records_) return;
  acknowledged_ = taken;
  exchange_.take(peer_, taken);
}

bool StreamReader::complete() const {
  if (peer_ == exchange_.rank() || !exchange_.present(peer_)) return true;
  return opened() && read_ == records_ && exchange_.published(peer_) == chunks();
}

std::optional<Debt> StreamReader::debt() const {
  if (peer_ == exchange_.rank() || !exchange_.present(peer_) || !opened()) return std::nullopt;
  // Of a stream without records, and of the last agreement, nothing can be counted but the word.
  if (read_ == records_) {
    if (complete()) return std::nullopt;
    return Debt{records_ + 1, records_};
  }
  return Debt{records_, read_};
}

void open_announced(Exchange& exchange, std::vector<StreamReader>& readers,
                    const std::vector<int64_t>* expected_rows) {
  if (!exchange.agreed()) exchange.hear(expected_rows);
  for (StreamReader& reader : readers) {
    const int32_t peer = reader.peer();
    if (peer == exchange.rank() || !exchange.present(peer)) continue;
    exchange.check_refusal(peer);
    if (!reader.opened() && exchange.heard(peer)) reader.open(exchange.announcement(peer).records);
  }
}

}  // namespace fanfold
