// One running combine of the high-throughput mode. As the expert side, this rank sums the rows of
// its local experts for each token of each source. As a source, it sums the rows that the ranks of
// its host and the gateways of other hosts return. As a gateway, it sums the rows of its host for
// sources on other hosts (host/high_throughput_forward.h).
#pragma once

#include <cstdint>
#include <vector>

#include "host/high_throughput.h"
#include "host/high_throughput_forward.h"
#include "host/local_sums.h"
#include "host/reduce.h"
#include "host/routes.h"
#include "host/stream.h"
#include "host/stream_paths.h"

namespace fanfold {

StreamLayout combine_stream(const HighThroughputOutputs& outputs, int32_t top_k,
                            int64_t ring_bytes);

class Combine {
 public:
  Combine(Exchange& exchange, const StreamLayout& layout, const HighThroughputOutputs& outputs,
          const HighThroughputPlan& plan, const HighThroughputResult& result);

  // Sends all rows and completes this rank's result, then leaves the call.
  void run(const std::vector<int64_t>& expected_rows);

 private:
  // Who returns rows to this rank: a rank of this host, or a gateway for all ranks of its host.
  struct Contributor {
    int32_t peer;
    std::vector<int32_t> members;
  };

  void add_contributors();
  void add_sources();

  bool sends_to(int32_t source) const;
  bool send(int32_t source);

  bool sum_tokens();
  bool all_arrived() const;
  void sum_piece();
  void sum_topk_weights();
  bool contributes(const Contributor& contributor) const;
  std::optional<Record> expect_record(StreamReader& reader);
  bool skip_missing();

  bool finished() const;
  bool ready();
  std::optional<Pending> pending(int32_t peer) const;

  Exchange& exchange_;
  StreamLayout layout_;
  const HighThroughputOutputs& outputs_;
  const HighThroughputPlan& plan_;
  const HighThroughputResult& result_;
  LocalSums sums_;
  std::vector<StreamWriter> writers_;  // [R]
  // [R]; the rows that this rank returns to itself wait until they are summed.
  std::vector<OutgoingRows> outgoing_;
  std::vector<Forward> forwards_;
  std::vector<Contributor> contributors_;  // in the order of the sum
  std::vector<StreamReader> readers_;      // of each contributor
  std::vector<ReduceTerm> rank_terms_;
  std::vector<StreamReader*> summed_;
  std::vector<uint16_t> own_row_;
  int32_t token_ = 0;
  int32_t piece_ = 0;
};

}  // namespace fanfold
