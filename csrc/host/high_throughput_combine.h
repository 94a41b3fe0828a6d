// One running combine of the high-throughput mode: as expert side, this rank sums the rows of its
// local experts for each token of each source; as source, it sums what the ranks send.
#pragma once

#include <cstdint>
#include <vector>

#include "host/high_throughput.h"
#include "host/reduce.h"
#include "host/routes.h"
#include "host/stream.h"

namespace fanfold {

// Each pair of ranks has a ring of its own, all of the same size, side by side in the staging
// memory of the expert side.
int64_t combine_ring_bytes(const Exchange& exchange);
StreamLayout combine_stream(const HighThroughputOutputs& outputs, int32_t top_k,
                            int64_t ring_bytes);

class Combine {
 public:
  Combine(Exchange& exchange, const StreamLayout& layout, const HighThroughputOutputs& outputs,
          const HighThroughputPlan& plan, const HighThroughputResult& result);

  // Works until everything is sent and this rank's result is complete, then leaves the call.
  void run(const std::vector<int64_t>& expected_rows);

 private:
  // The rows that one source is to get, numbered over all sources.
  struct Departures {
    int64_t next;
    int64_t end;
    int32_t piece = 0;
  };
  // Columns of a row: one piece.
  struct Columns {
    int64_t begin;
    int64_t count;
  };

  bool send(int32_t source);
  void stage(int64_t n, const Columns& columns, uint16_t* row);
  void gather(int64_t n, const uint16_t* y, std::vector<ReduceTerm>& terms) const;
  float lane(int64_t n, int32_t k) const;
  Columns columns_of(int32_t piece) const;

  bool fold();
  bool all_arrived() const;
  void fold_piece();
  void fold_lanes();
  Record expect_record(StreamReader& reader);
  bool contributes(int32_t peer) const;

  bool finished() const;
  bool ready();
  std::optional<Debt> debt(int32_t peer) const;

  Exchange& exchange_;
  StreamLayout layout_;
  const HighThroughputOutputs& outputs_;
  const HighThroughputPlan& plan_;
  const HighThroughputResult& result_;
  std::vector<StreamWriter> writers_;  // [R]
  std::vector<StreamReader> readers_;  // [R]
  std::vector<Departures>
      departures_;                 // [R]; this rank's own rows wait there until they are folded
  std::vector<ReduceTerm> terms_;  // of one local sum
  std::vector<ReduceTerm> next_terms_;
  std::vector<ReduceTerm> rank_terms_;
  std::vector<uint16_t> own_row_;
  int32_t token_ = 0;
  int32_t piece_ = 0;
};

}  // namespace fanfold
