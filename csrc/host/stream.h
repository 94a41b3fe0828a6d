// Streams records from one rank to others through a ring of chunks.
//
// The writer fills records and publishes full chunks. It reuses a chunk once every reader has
// acknowledged it. The call header tells readers the length of the stream. The writer holds back
// the last publish of a stream until it has agreed with all ranks, so a reader that has the whole
// stream knows that its writer has agreed.
//
// The ring lies on the readers' host: in the writer's memory if that is there, else in the memory
// of a gateway (host/stream_paths.h), to which each chunk is put.
#pragma once

#include <cstdint>
#include <vector>

#include "host/exchange.h"
#include "layout/high_throughput.h"

namespace fanfold {

// One record inside a ring.
struct Record {
  std::byte* side;
  std::byte* payload;

  RecordHead& head() const { return *reinterpret_cast<RecordHead*>(side); }
  int16_t* ids() const { return reinterpret_cast<int16_t*>(side + sizeof(RecordHead)); }
  float* weights(const RecordLayout& layout) const {
    return reinterpret_cast<float*>(side + layout.weights_offset());
  }
  uint32_t* scales(const RecordLayout& layout) const {
    return reinterpret_cast<uint32_t*>(side + layout.scales_offset());
  }
};

// A stream as its writer sees it.
struct OutgoingPath {
  struct Reader {
    int32_t rank;
    int64_t ack;  // offset in the writer's memory
  };

  StreamPlace ring;  // the rank in whose memory the ring lies, and where
  std::vector<StreamPlace> published;
  std::vector<Reader> readers;
};

// A stream as one of its readers sees it.
struct IncomingPath {
  int32_t peer;      // the writer
  StreamPlace ring;  // in memory of this host
  StreamPlace published;
  StreamPlace ack;
};

class StreamWriter {
 public:
  StreamWriter(Exchange& exchange, const StreamLayout& layout, OutgoingPath path, int64_t records);

  // Sets the length of a stream that was not known at first. Until then nothing may be staged.
  void open(int64_t records) { records_ = records; }
  int64_t records() const { return records_; }
  int64_t staged() const { return staged_; }

  bool has_room();
  Record next() const { return record_at(staged_); }
  void advance();
  // Whether the last record has completed a chunk. Callers then turn to other streams.
  bool at_chunk_end() const { return staged_ % layout_.records == 0; }

  // Publishes complete chunks that are not published yet, without the last one of the stream while
  // the ranks have not agreed. Returns whether it has published any.
  bool flush();
  bool closed() const { return closed_; }

  // For Exchange::wait: the records that `reader` must acknowledge before the writer can stage the
  // next one.
  std::optional<Pending> pending(int32_t reader) const;

 private:
  Record record_at(int64_t index) const {
    std::byte* ring = to_.place(path_.ring.offset);
    return Record{ring + layout_.side_offset(index), ring + layout_.payload_offset(index)};
  }
  // Whether the rank in whose memory the ring lies is not masked.
  bool reaches_readers() const { return exchange_.present(path_.ring.rank); }
  int32_t acknowledged(const OutgoingPath::Reader& reader) const;
  int32_t complete_chunks() const;
  void put(int32_t chunk) const;

  Exchange& exchange_;
  StreamLayout layout_;
  OutgoingPath path_;
  Peer to_;  // the owner of the ring
  int64_t records_;
  int64_t staged_ = 0;
  int32_t published_ = 0;
  int32_t acknowledged_by_all_ = 0;
  bool closed_ = false;
};

class StreamReader {
 public:
  // `open` must follow once the length is known.
  StreamReader(Exchange& exchange, const StreamLayout& layout, const IncomingPath& path);
  void open(int64_t records) { records_ = records; }
  bool opened() const { return records_ >= 0; }
  // Opens a stream that ends with a record of kEndToken, and ends it there.
  void open_until_end() { open(kUntilEnd); }
  void end() { records_ = read_; }
  bool ended() const { return records_ == read_; }

  bool arrived() const;  // whether the next record can be read
  Record next() const {
    auto* ring = const_cast<std::byte*>(ring_);
    return Record{ring + layout_.side_offset(read_), ring + layout_.payload_offset(read_)};
  }
  void advance();
  bool at_chunk_end() const { return read_ % layout_.records == 0; }
  // Lets the writer reuse the chunks that have been read. Callers call it before they wait.
  void acknowledge();

  // Whether its writer is masked, or the gateway through which it comes.
  bool lost() const;
  // Whether the whole stream has been read and its writer has agreed to the call, or it is lost.
  bool complete() const;
  // For Exchange::wait: the records, or the last publish, that have not arrived.
  std::optional<Pending> pending() const;
  int32_t peer() const { return path_.peer; }

 private:
  static constexpr int64_t kUntilEnd = int64_t{1} << 62;

  int32_t chunks() const { return static_cast<int32_t>(ceil_div(records_, layout_.records)); }

  Exchange& exchange_;
  StreamLayout layout_;
  IncomingPath path_;
  const std::byte* ring_;
  int64_t records_ = -1;
  int64_t read_ = 0;
  int32_t acknowledged_ = 0;
};

// Receives the call headers that have arrived, and opens the streams whose headers tell their
// lengths. Throws PeerRefused if a peer has refused the call.
void open_streams(Exchange& exchange, std::vector<StreamReader>& readers,
                  const std::vector<int64_t>* expected_rows);

}  // namespace fanfold
