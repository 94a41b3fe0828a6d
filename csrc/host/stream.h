// Records streaming from one rank to others through a ring of chunks in the writer's memory.
//
// The writer fills records, publishes full chunks and reuses one when every reader has taken it. A
// stream's length is known to both ends from the announcement. The last publish of a stream is held
// back until the writer has agreed with all ranks, so a reader that has the whole stream knows
// that.
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

class StreamWriter {
 public:
  StreamWriter(Exchange& exchange, const StreamLayout& layout, std::byte* ring,
               std::vector<int32_t> readers, int64_t records);

  bool has_room();
  Record next() const { return record_at(staged_); }
  void advance();
  // A chunk has just been completed: a good moment to turn to other work.
  bool at_chunk_end() const { return staged_ % layout_.records == 0; }

  // Publishes what was held back, if it may be now. True if there was something.
  bool flush();
  bool closed() const { return closed_; }

  // What `reader` owes: records it must take before the next can be staged.
  std::optional<Debt> debt(int32_t reader) const;

 private:
  Record record_at(int64_t index) const {
    return Record{ring_ + layout_.side_offset(index), ring_ + layout_.payload_offset(index)};
  }
  int32_t complete_chunks() const;

  Exchange& exchange_;
  StreamLayout layout_;
  std::byte* ring_;
  std::vector<int32_t> readers_;
  int64_t records_;
  int64_t staged_ = 0;
  int32_t published_ = 0;
  int32_t taken_by_all_ = 0;
  bool closed_ = false;
};

class StreamReader {
 public:
  // Nothing is known of the stream before `open`.
  StreamReader(Exchange& exchange, const StreamLayout& layout, const std::byte* ring, int32_t peer);
  void open(int64_t records);
  bool opened() const { return records_ >= 0; }

  bool arrived() const;  // the next record is there
  Record next() const {
    auto* ring = const_cast<std::byte*>(ring_);
    return Record{ring + layout_.side_offset(read_), ring + layout_.payload_offset(read_)};
  }
  void advance();
  bool at_chunk_end() const { return read_ % layout_.records == 0; }
  // Lets the writer reuse what has been read; called when there is nothing more to read for now.
  void acknowledge();

  // The whole stream has been read, and its writer has agreed to the call. A masked peer's stream
  // ends where it is.
  bool complete() const;
  std::optional<Debt> debt() const;
  int32_t peer() const { return peer_; }

 private:
  int32_t chunks() const { return static_cast<int32_t>(ceil_div(records_, layout_.records)); }

  Exchange& exchange_;
  StreamLayout layout_;
  const std::byte* ring_;
  int32_t peer_;
  int64_t records_ = -1;
  int64_t read_ = 0;
  int32_t acknowledged_ = 0;
};

// Hears what peers have announced since, and opens their streams. Throws PeerRefused if one has
// made the call void.
void open_announced(Exchange& exchange, std::vector<StreamReader>& readers,
                    const std::vector<int64_t>* expected_rows);

}  // namespace fanfold
