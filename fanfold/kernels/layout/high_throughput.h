// Where everything of the high-throughput mode lies in a rank's symmetric memory, and how rows are
// arranged in the streams between ranks.
//
//   signals        one word of each kind from every peer, and what this rank itself waits for
//   call headers   [peer]                 written by the peer when a call begins
//   counts         [peer][local expert]   written by the peer when a routing is new
//   staging        the rings that this rank streams rows through: single writer, read by peers
//
// The sizes of tensors appear nowhere: a tensor of any length passes through the rings.
#pragma once

#include "layout/types.h"

namespace fanfold {

// Room for the counts of every expert, however they are spread over the ranks.
inline constexpr int32_t kMostExperts = 32768;

struct HighThroughputSignals {
  int32_t ranks;

  enum Kind : int32_t {
    kHeader = 0,     // value: 0, or kRefusedValue
    kPublished = 1,  // value: chunks of the peer's stream that may be read, or kRefusedValue
    kAck = 2,        // value: chunks of this rank's stream that the peer has read, or kLeft
    // Of the stream for one source, whose gateway reads it: in the memory of the writer.
    kForwarded = 3,   // value: chunks that may be read
    kForwardAck = 4,  // value: chunks that the gateway has read
    kHeartbeat = 5,   // of a peer on another host: as at watch_offset() in its own memory
    kKinds = 6,
  };

  FANFOLD_HD constexpr int64_t offset(Kind kind, int32_t peer) const {
    return (int64_t{kind} * ranks + peer) * 8;
  }
  // Written by its owner while it waits: epoch: a count that shows it is alive; value: the rank it
  // holds responsible, plus one; 0 while it waits for nobody; negated once it has given up.
  FANFOLD_HD constexpr int64_t watch_offset() const {
    return align_up(int64_t{kKinds} * ranks * 8, kAreaAlignment);
  }
  FANFOLD_HD constexpr int64_t bytes() const { return watch_offset() + kAreaAlignment; }
};

// The peer has left the call: it reads nothing more of this epoch.
inline constexpr int32_t kLeft = 0x7fffffff;

enum class HighThroughputCall : int32_t {
  kNone = 0,
  kDispatch = 1,
  kCachedDispatch = 2,
  kCombine = 3,
};

// The signature of a call, which must be the same on all ranks.
struct CallSignature {
  HighThroughputCall call;
  int32_t experts;
  int32_t top_k;
  int32_t weighted;     // 1 if the call sends float32 weights of the top-k entries
  int32_t scale_words;  // 4-byte scales of a row
  int32_t reserved;
  int64_t row_bytes;
};

struct alignas(kAreaAlignment) CallHeader {
  CallSignature signature;
  int64_t records;  // in the stream that the sending rank opens to the reader
  int64_t rows;     // those of them that are for the reader
};

static_assert(sizeof(CallHeader) == kAreaAlignment);

struct HighThroughputLayout {
  int32_t ranks;

  FANFOLD_HD constexpr int64_t header_offset(int32_t peer) const {
    return HighThroughputSignals{ranks}.bytes() + peer * int64_t{sizeof(CallHeader)};
  }
  FANFOLD_HD constexpr int64_t counts_offset(int32_t peer, int32_t experts_per_rank) const {
    return header_offset(ranks) + peer * align_up(int64_t{4} * experts_per_rank, kAreaAlignment);
  }
  // Each peer's counts are rounded up to an area of their own.
  FANFOLD_HD constexpr int64_t staging_offset() const {
    return header_offset(ranks) + int64_t{4} * kMostExperts + int64_t{ranks} * kAreaAlignment;
  }
  FANFOLD_HD constexpr int64_t bytes(int64_t staging_bytes) const {
    return staging_offset() + align_up(staging_bytes, kAreaAlignment);
  }
};

static_assert(HighThroughputLayout{3}.staging_offset() % kAreaAlignment == 0);
static_assert(HighThroughputLayout{8}.counts_offset(8, kMostExperts / 8) <=
              HighThroughputLayout{8}.staging_offset());
static_assert(HighThroughputLayout{1000}.counts_offset(1000, 33) <=
              HighThroughputLayout{1000}.staging_offset());

// One record: a piece of one token's row, and beside it what the reader needs to place the row.
// Nearly always a piece is the whole row; a row too long for its ring travels in several, and what
// stands beside it counts in the first.
struct RecordHead {
  int32_t token;
  int32_t piece;
};

// Behind the last record for a gateway, which does not know how many there are.
inline constexpr int32_t kEndToken = 0x7fffffff;
// In place of a record that the source expects, of a rank that the gateway has masked.
inline constexpr int32_t kMissingToken = -1;

struct RecordLayout {
  int32_t ids;          // int16 expert ids
  int32_t weights;      // float32
  int32_t scale_words;  // 4 bytes each
  int64_t piece_bytes;  // a multiple of 16

  FANFOLD_HD constexpr int64_t weights_offset() const {
    return align_up(int64_t{sizeof(RecordHead)} + int64_t{2} * ids, 4);
  }
  FANFOLD_HD constexpr int64_t scales_offset() const {
    return weights_offset() + int64_t{4} * weights;
  }
  FANFOLD_HD constexpr int64_t side_bytes() const {
    return align_up(scales_offset() + int64_t{4} * scale_words, kRowAlignment);
  }
  FANFOLD_HD constexpr int64_t bytes() const { return side_bytes() + piece_bytes; }
};

// A ring of chunks. Inside a chunk the sides of its records come first, so that a reader finds its
// rows without touching those of others.
struct StreamLayout {
  RecordLayout record;
  int32_t pieces;   // records of one row
  int32_t records;  // of one chunk
  int32_t chunks;   // of the ring; 0 if no ring of the size could hold a record

  // Large enough that signals cost nothing, small enough that a chunk is still in cache when the
  // last reader comes for it.
  static constexpr int64_t kChunkBytes = 128 << 10;
  // With fewer, writer and reader would wait for each other in turns.
  static constexpr int64_t kLeastChunks = 4;

  FANFOLD_HD static constexpr StreamLayout of(int64_t ring_bytes, int64_t row_bytes,
                                              RecordLayout record) {
    const int64_t most = ring_bytes / kLeastChunks / kRowAlignment * kRowAlignment;
    const int64_t room = most - record.side_bytes();
    if (room < kRowAlignment) return StreamLayout{record, 1, 0, 0};
    const int64_t parts = row_bytes == 0 ? 1 : ceil_div(row_bytes, room);
    record.piece_bytes = align_up(ceil_div(row_bytes, parts), kRowAlignment);
    // Rounding pieces up may have made one fewer of them enough.
    const int64_t pieces = row_bytes == 0 ? 1 : ceil_div(row_bytes, record.piece_bytes);
    const int64_t wanted = most < kChunkBytes ? most : kChunkBytes;
    const int64_t fitting = wanted / record.bytes();
    const int64_t records = fitting > 0 ? fitting : 1;
    return StreamLayout{record, static_cast<int32_t>(pieces), static_cast<int32_t>(records),
                        static_cast<int32_t>(ring_bytes / (records * record.bytes()))};
  }

  FANFOLD_HD constexpr int64_t chunk_bytes() const { return records * record.bytes(); }
  // Of record `index` of the stream, within the ring.
  FANFOLD_HD constexpr int64_t side_offset(int64_t index) const {
    return index / records % chunks * chunk_bytes() + index % records * record.side_bytes();
  }
  FANFOLD_HD constexpr int64_t payload_offset(int64_t index) const {
    return index / records % chunks * chunk_bytes() + records * record.side_bytes() +
           index % records * record.piece_bytes;
  }
};

static_assert(StreamLayout::of(8 << 20, 2048, {8, 8, 0, 0}).pieces == 1);
static_assert(StreamLayout::of(64 << 10, 131072, {32, 32, 512, 0}).chunks >= 4);
static_assert(StreamLayout::of(64 << 10, 131072, {32, 32, 512, 0}).pieces > 1);
static_assert(StreamLayout::of(512, 32, {32, 32, 0, 0}).chunks == 0);

}  // namespace fanfold
