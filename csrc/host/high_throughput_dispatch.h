// One running dispatch of the high-throughput mode: this rank's tokens go out, its rows come in.
#pragma once

#include <cstdint>
#include <vector>

#include "host/high_throughput.h"
#include "host/routes.h"
#include "host/row_copy.h"
#include "host/stream.h"

namespace fanfold {

// The stream that a dispatch of such tokens opens.
StreamLayout dispatch_stream(const HighThroughputTokens& tokens, bool routed,
                             int64_t staging_bytes);

class Dispatch {
 public:
  // `first_rows` ([R, E_l], expert-major) is where the rows of each source and expert begin: given
  // for a new routing, whose plan the dispatch completes, and null for a cached one.
  Dispatch(Exchange& exchange, const StreamLayout& layout, const HighThroughputTokens& tokens,
           const HighThroughputPlan& plan, const HighThroughputReceived& into,
           const std::vector<int64_t>* first_rows);

  // Works until this rank's tokens are staged and its rows are in place, then leaves the call.
  void run(const std::vector<int64_t>* expected_rows);

 private:
  // A stretch of one row's bytes, with the row's scales.
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
  // The rows of one source rank, numbered over all sources.
  struct Arrivals {
    int64_t next;
    int64_t end;
    int64_t current = -1;  // the row that is arriving in pieces; -1: the record is not for us
    bool complete = true;  // whether `current` has all its pieces
  };

  bool stage();
  void stage_record(int32_t token);
  void keep(int32_t token);
  bool take(StreamReader& reader);
  void accept(Origin origin, const Record& record, Arrivals& arrivals);
  bool is_mine(const Record& record, const Arrivals& arrivals) const;
  int64_t admit(Origin origin, const int16_t* ids, const float* weights);
  void deliver(int64_t n, Origin origin, const Piece& piece);
  void put(int64_t row, Origin origin, const Piece& piece);

  void blank(int64_t row);
  void blank_padding();
  void blank_missing(int32_t source);
  void check_complete();
  bool finished() const;
  bool ready();
  std::optional<Debt> debt(int32_t peer) const;

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
  StreamWriter writer_;
  std::vector<StreamReader> readers_;  // [R]
  std::vector<Arrivals> arrivals_;     // [R]
  std::vector<int64_t> next_rows_;     // [R, E_l]
  std::vector<int16_t> ids_;           // [K] of the own token at hand
  int32_t token_ = 0;
  int32_t piece_ = 0;
};

}  // namespace fanfold
