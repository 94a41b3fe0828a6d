#include "host/stream.h"

#include <algorithm>
#include <utility>

namespace fanfold {

StreamWriter::StreamWriter(Exchange& exchange, const StreamLayout& layout, OutgoingPath path,
                           int64_t records)
    : exchange_(exchange), layout_(layout), path_(std::move(path)),
      to_(exchange.peer(path_.ring.rank)), records_(records) {}

int32_t StreamWriter::acknowledged(const OutgoingPath::Reader& reader) const {
  return std::max(0, exchange_.chunks(StreamPlace{exchange_.rank(), reader.ack}));
}

bool StreamWriter::has_room() {
  const int64_t chunk = staged_ / layout_.records;
  if (chunk - acknowledged_by_all_ < layout_.chunks) return true;
  int32_t by_all = kLeft;
  for (const OutgoingPath::Reader& reader : path_.readers) {
    const bool reads = exchange_.present(reader.rank) && reaches_readers();
    if (reads) by_all = std::min(by_all, acknowledged(reader));
  }
  // Readers that have left before the end have not read what may still be on its way, in each round
  // of the ring.
  if (by_all == kLeft) to_.fence();
  acknowledged_by_all_ = by_all == kLeft ? static_cast<int32_t>(chunk) : by_all;
  return chunk - acknowledged_by_all_ < layout_.chunks;
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

// Puts the records of a chunk; the last one of the stream may have fewer than it could hold.
void StreamWriter::put(int32_t chunk) const {
  const int64_t first = int64_t{chunk} * layout_.records;
  const int64_t records = std::min(int64_t{layout_.records}, staged_ - first);
  RowRun run(to_);
  run.put(path_.ring.offset + layout_.side_offset(first), records * layout_.record.side_bytes());
  run.put(path_.ring.offset + layout_.payload_offset(first), records * layout_.record.piece_bytes);
  run.finish();
}

bool StreamWriter::flush() {
  if (closed_) return false;
  int32_t chunks = complete_chunks();
  const bool last = staged_ == records_;
  const bool closing = last && exchange_.agreed();
  if (last && !closing) --chunks;
  if (chunks <= published_ && !closing) return false;
  for (int32_t chunk = published_; chunk < chunks; ++chunk) put(chunk);
  for (const StreamPlace& word : path_.published) {
    if (exchange_.present(word.rank)) exchange_.set_chunks(word, chunks);
    if (word.rank != exchange_.rank()) continue;
    for (const OutgoingPath::Reader& reader : path_.readers) exchange_.peer(reader.rank).wake();
  }
  published_ = chunks;
  closed_ = closing;
  return true;
}

std::optional<Pending> StreamWriter::pending(int32_t rank) const {
  const auto reader = std::ranges::find(path_.readers, rank, &OutgoingPath::Reader::rank);
  if (reader == path_.readers.end()) return std::nullopt;
  const int64_t needed = staged_ / layout_.records - layout_.chunks + 1;
  const int64_t read = acknowledged(*reader);
  if (staged_ == records_ || read >= needed || !reaches_readers()) return std::nullopt;
  return Pending{needed * layout_.records, read * layout_.records};
}

StreamReader::StreamReader(Exchange& exchange, const StreamLayout& layout, const IncomingPath& path)
    : exchange_(exchange), layout_(layout), path_(path), ring_(exchange.at(path.ring)) {}

bool StreamReader::arrived() const {
  return opened() && read_ < records_ &&
         read_ < exchange_.chunks(path_.published) * int64_t{layout_.records};
}

void StreamReader::advance() {
  ++read_;
  // Often enough that the writer does not run out of room.
  const auto read_chunks = static_cast<int32_t>(read_ / layout_.records);
  if (read_chunks - acknowledged_ >= std::max(1, layout_.chunks / 4)) acknowledge();
}

void StreamReader::acknowledge() {
  const auto read_chunks = static_cast<int32_t>(read_ / layout_.records);
  if (read_chunks == acknowledged_ || read_ == records_) return;
  acknowledged_ = read_chunks;
  exchange_.set_chunks(path_.ack, read_chunks);
}

bool StreamReader::lost() const {
  return !exchange_.present(path_.peer) || !exchange_.present(path_.published.rank);
}

bool StreamReader::complete() const {
  return path_.peer == exchange_.rank() || lost() ||
         (opened() && ended() && exchange_.chunks(path_.published) == chunks());
}

std::optional<Pending> StreamReader::pending() const {
  if (path_.peer == exchange_.rank() || lost() || !opened()) return std::nullopt;
  if (records_ == kUntilEnd) return Pending{read_ + 1, read_};
  // The last publish, by which the writer agrees, counts as one more record.
  if (ended()) {
    if (complete()) return std::nullopt;
    return Pending{records_ + 1, records_};
  }
  return Pending{records_, read_};
}

void open_streams(Exchange& exchange, std::vector<StreamReader>& readers,
                  const std::vector<int64_t>* expected_rows) {
  if (!exchange.agreed()) exchange.receive_headers(expected_rows);
  for (int32_t peer = 0; peer < exchange.ranks(); ++peer) {
    if (peer != exchange.rank() && exchange.present(peer)) exchange.check_refusal(peer);
  }
  for (StreamReader& reader : readers) {
    const int32_t peer = reader.peer();
    if (peer == exchange.rank() || !exchange.present(peer)) continue;
    if (reader.opened() || !exchange.header_received(peer)) continue;
    reader.open(exchange.header(peer).records);
  }
}

}  // namespace fanfold
