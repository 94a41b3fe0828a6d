// High-throughput dispatch and combine between the processes of a host.
//
// The executable specification of the protocol (docs/high_throughput.md): the tests compare every
// other backend with it. One object serves calls of any size, because rows of any number stream
// through its staging memory.
//
//   exchange_counts   for a new routing: the ranks exchange row counts, so that each rank knows how
//                     much to allocate and the position of each received row
//   dispatch_rows     stages each token once; every rank reads its rows and copies them to the
//                     caller's memory
//   dispatch_cached   dispatches by the plan of an earlier dispatch: no counts, no routing
//   combine           the expert side sums its rows of each token, the source sums over the ranks
//
// N = received rows (one for each token and rank), K = top_k, T = own tokens, R = ranks, E_l =
// local experts. Rows are ordered by source rank, then source token, also within each expert.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/array.h"
#include "host/exchange.h"
#include "layout/high_throughput.h"
#include "memory/symmetric.h"

namespace fanfold {

// A rank's input of a dispatch. The caller must have checked the indices. A tensor without elements
// may have a null address, so `weighted` says whether weights are given.
struct HighThroughputTokens {
  Array<const std::byte> rows;   // [T, row_bytes], contiguous
  int64_t row_bytes;             // a multiple of 16
  Array<const uint32_t> scales;  // [T, scale_words] with the strides below, in words; may be null
  int32_t scale_words;
  int64_t scale_token_stride;
  int64_t scale_word_stride;
  Array<const int64_t> topk_idx;    // [T, K], -1 for no expert; null if a plan has the routing
  Array<const float> topk_weights;  // [T, K]
  bool weighted;                    // whether the call sends topk_weights; the same on all ranks
  int32_t tokens;
  int32_t experts;
  int32_t top_k;
};

// The plan of one routing on this rank. exchange_counts and dispatch_rows write it; the other calls
// only read it.
struct HighThroughputPlan {
  int32_t experts;
  int32_t top_k;
  int32_t tokens;
  int64_t received;                  // N
  Array<uint8_t> is_token_in_rank;   // [T, R]
  Array<int32_t> source_prefix;      // [R] received rows of ranks 0 to r
  Array<int32_t> tokens_per_expert;  // [E_l] rows of each local expert
  Array<int64_t> offsets;            // [E_l + 1] first row of each expert; aligned
  Array<int32_t> source_token;       // [N]
  Array<int64_t> topk_idx;           // [N, K] local expert; -1 if on another rank
  Array<float> topk_weights;         // [N, K], 0 where topk_idx is -1; null: unweighted
  Array<int32_t> rows_of;            // [N, K] row in expert-major order, -1 likewise
};

// The output of a dispatch.
struct HighThroughputReceived {
  Array<std::byte> rows;            // [capacity, row_bytes]
  Array<uint32_t> scales;           // [capacity, scale_words] or null
  Array<float> row_weights;         // [capacity], expert-major only; may be null
  Array<int32_t> row_source_rank;   // [capacity], -1 if the row is unused
  Array<int32_t> row_source_token;  // [capacity]
  int64_t capacity;                 // in rows; dispatch zeroes unused rows
  bool expert_major;  // one row for each (token, local expert), else for each (token, rank)
};

// A rank's input of combine: its experts' outputs.
struct HighThroughputOutputs {
  Array<const uint16_t> y;          // [rows, hidden] bf16
  int32_t hidden;                   // 0 if the call returns only weights
  Array<const float> row_weights;   // [rows] factor of each row, expert-major only; null for 1
  Array<const float> topk_weights;  // expert-major [rows], token-major [N, K]
  bool weighted;                    // whether the call returns topk_weights; the same on all ranks
  bool expert_major;
};

struct HighThroughputResult {
  Array<uint16_t> out;            // [T, hidden] bf16
  Array<const uint16_t> bias[2];  // [T, hidden] bf16 each; null for none
  Array<float> weights;           // [T, K]: topk_weights, summed over the ranks
};

class HighThroughput {
 public:
  // Uses `bytes` at `offset` of the modes' part of `memory`, which must outlive this object. The
  // first call has the number `epoch` + 1; `epoch` must be the same on all ranks.
  HighThroughput(SymmetricMemory& memory, int64_t offset, int64_t bytes, uint32_t epoch = 0);

  int32_t ranks() const { return exchange_.ranks(); }

  // First half of a dispatch with a new routing. Writes `received`, `is_token_in_rank`,
  // `source_prefix`, `tokens_per_expert` and `offsets` of `plan`; rounds the rows of each expert up
  // to `alignment`.
  void exchange_counts(const HighThroughputTokens& tokens, HighThroughputPlan& plan,
                       int32_t alignment);
  // Second half. Writes the rest of `plan`, and the rows.
  void dispatch_rows(const HighThroughputTokens& tokens, const HighThroughputPlan& plan,
                     const HighThroughputReceived& received);
  void dispatch_cached(const HighThroughputTokens& tokens, const HighThroughputPlan& plan,
                       const HighThroughputReceived& received);
  void combine(const HighThroughputOutputs& outputs, const HighThroughputPlan& plan,
               const HighThroughputResult& result);

  // Take part in a call whose input this rank has found bad, or for which it could not allocate
  // memory after exchange_counts. They abort the call on every rank, and all ranks stay in step.
  void refuse_dispatch(const std::string& reason);
  void refuse_combine(const std::string& reason);

 private:
  void adopt_counts(HighThroughputPlan& plan, int32_t alignment);
  void count_dispatched(const HighThroughputTokens& tokens, const HighThroughputPlan& plan,
                        const std::vector<int64_t>& rows);

  Exchange exchange_;
  // Between the halves of a dispatch: [R, E_l] the first row of each source and expert.
  std::vector<int64_t> first_rows_;
  std::vector<int64_t> sent_rows_;  // likewise: [R] this rank's rows for each
  bool counted_ = false;
};

}  // namespace fanfold
