// One running dispatch of the high-throughput mode: sends this rank's tokens and receives its rows.
#pragma once

#include <cstdint>
#include <vector>

#include "host/high_throughput.h"
#include "host/routes.h"
#include "host/row_copy.h"
#include "host/stream.h"
#include "host/stream_paths.h"

namespace fanfold {

// The layout of the stream that a dispatch of these tokens opens.
StreamLayout dispatch_stream(const HighThroughputTokens& tokens, bool routed, int64_t ring_bytes);

class Dispatch {
 public:
  // For a new routing, whose plan the dispatch completes, `first_rows` ([R, E_l], expert-major) is
  // the first row of each source and expert. For a cached dispatch it is null.
  Dispatch(Exchange& exchange, const StreamLayout& layout, const HighThroughputTokens& tokens,
           const HighThroughputPlan& plan, const HighThroughputReceived& into,
           const std::vector<int64_t>* first_rows);

  // Stages this rank's tokens and copies its rows to the caller's memory, then leaves the call.
  void run(const std::vector<int64_t>* expected_rows);

 private:
  // A contiguous part of one row, with the scales of the row.
  struct Piece {
    const std::byte* payload;
    int64_t offset;
    int64_t bytes;
    const uint32_t* scales;
    int64_t scale_stride;
  };
  struct Origin {
    int32_t rank;
    int32_t token;
  };
  // The tokens that this rank sends to the other ranks of one host.
  struct Outgoing {
    std::vector<int32_t> readers;
    StreamWriter writer;
    bool here;
    int32_t token = 0;
    int32_t piece = 0;
  };
  // The rows of one source rank, numbered over all sources.
  struct IncomingRows {
    int64_t next;
    int64_t end;
    int64_t current = -1;  // the row whose pieces arrive; -1 if it is not for this rank
    bool complete = true;  // whether all pieces of `current` have arrived
  };

  bool stage(Outgoing& outgoing);
  void stage_record(Outgoing& outgoing);
  bool staging(const Outgoing& outgoing) const { return outgoing.token < tokens_.tokens; }
  void deliver_own(int32_t token);
  bool receive(StreamReader& reader);
  void receive_record(Origin origin, const Record& record, IncomingRows& incoming);
  bool is_mine(const Record& record, const IncomingRows& incoming) const;
  int64_t assign_row(Origin origin, const int16_t* ids, const float* weights);
  void deliver(int64_t n, Origin origin, const Piece& piece);
  void copy_piece(int64_t row, Origin origin, const Piece& piece);

  void blank(int64_t row);
  void blank_padding();
  void blank_missing(int32_t source);
  void check_complete();
  bool finished() const;
  bool ready();
  std::optional<Pending> pending(int32_t peer) const;

  Exchange& exchange_;
  StreamLayout layout_;
  const HighThroughputTokens& tokens_;
  const HighThroughputPlan& plan_;
  const HighThroughputReceived& into_;
  const std::vector<int64_t>* first_rows_;
  TokenRanks token_ranks_;
  int32_t locals_;
  int32_t first_expert_;
  RowCopy copy_;
  std::vector<Outgoing> outgoing_;      // [hosts]
  std::vector<StreamReader> readers_;   // [R]
  std::vector<IncomingRows> incoming_;  // [R]
  std::vector<int64_t> next_rows_;      // [R, E_l]
  std::vector<int16_t> ids_;            // [K] of the current own token
};

}  // namespace fanfold
