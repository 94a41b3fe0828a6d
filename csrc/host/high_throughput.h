// High-throughput dispatch and combine between the processes of a host.
//
// The executable specification of the protocol (docs/high_throughput.md): every other backend is
// tested against it. One object serves calls of any size; what streams through its staging memory
// is unbounded.
//
//   exchange_counts   a new routing: each rank tells its peers the rows that are to come, so that
//                     every rank knows how much to allocate and where each row will lie
//   dispatch_rows     each token is staged once; every rank takes its own and puts each row where
//                     the caller will read it
//   dispatch_cached   the same with a plan that an earlier dispatch has made: no counts, no routing
//   combine           the expert side sums its rows of each token, the source sums the ranks
//
// N = rows received (one for each token and rank), K = top_k, T = own tokens, R = ranks, E_l =
// local experts. Rows are ordered by source rank, then source token, and inside each expert too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/array.h"
#include "host/exchange.h"
#include "layout/high_throughput.h"
#include "memory/symmetric.h"

namespace fanfold {

// What this rank brings to a dispatch. Indices are trusted: the caller has checked them. The
// address of a tensor without elements may be null, so whether weights are given stands apart.
struct HighThroughputTokens {
  Array<const std::byte> rows;   // [T, row_bytes], contiguous
  int64_t row_bytes;             // a multiple of 16
  Array<const uint32_t> scales;  // [T, scale_words] with the strides below, in words; may be null
  int32_t scale_words;
  int64_t scale_token_stride;
  int64_t scale_word_stride;
  Array<const int64_t> topk_idx;    // [T, K], -1 for none; null where a plan has the routing
  Array<const float> topk_weights;  // [T, K]
  bool weighted;                    // whether topk_weights travel along, on all ranks or on none
  int32_t tokens;
  int32_t experts;
  int32_t top_k;
};

// What one routing means on this rank. exchange_counts and dispatch_rows write it, the other calls
// only read it.
struct HighThroughputPlan {
  int32_t experts;
  int32_t top_k;
  int32_t tokens;
  int64_t received;                  // N
  Array<uint8_t> is_token_in_rank;   // [T, R]
  Array<int32_t> source_prefix;      // [R] rows received from ranks 0 to r
  Array<int32_t> tokens_per_expert;  // [E_l] rows of each local expert
  Array<int64_t> offsets;            // [E_l + 1] where each expert's rows begin; aligned
  Array<int32_t> source_token;       // [N]
  Array<int64_t> topk_idx;           // [N, K] local expert, -1 elsewhere
  Array<float> topk_weights;         // [N, K], 0 elsewhere; null if no weights came along
  Array<int32_t> rows_of;            // [N, K] the row in expert-major order, -1 elsewhere
};

// Where dispatch leaves the rows.
struct HighThroughputReceived {
  Array<std::byte> rows;            // [capacity, row_bytes]
  Array<uint32_t> scales;           // [capacity, scale_words] or null
  Array<float> row_weights;         // [capacity], expert-major only; may be null
  Array<int32_t> row_source_rank;   // [capacity], -1 where there is no row
  Array<int32_t> row_source_token;  // [capacity]
  int64_t capacity;                 // rows; what no token fills is zeroed
  bool expert_major;  // a copy for each local expert, instead of one for each (token, rank)
};

// What this rank brings to combine.
struct HighThroughputOutputs {
  Array<const uint16_t> y;          // [rows, hidden] bf16
  int32_t hidden;                   // 0 if only weights travel
  Array<const float> row_weights;   // [rows] factor of each row, expert-major only; null for 1
  Array<const float> lane_weights;  // expert-major [rows], token-major [N, K]
  bool lanes;                       // whether lane_weights travel, on all ranks or on none
  bool expert_major;
};

struct HighThroughputResult {
  Array<uint16_t> out;            // [T, hidden] bf16
  Array<const uint16_t> bias[2];  // [T, hidden] bf16 each; null where there is none
  Array<float> weights;           // [T, K]: the lanes of all ranks, summed
};

class HighThroughput {
 public:
  // Uses `bytes` at `offset` of the modes' part of `memory`, which must outlive it. Calls are
  // numbered from `epoch` + 1, on all ranks alike.
  HighThroughput(SymmetricMemory& memory, int64_t offset, int64_t bytes, uint32_t epoch = 0);

  int32_t ranks() const { return exchange_.ranks(); }

  // A new routing, first half: writes is_token_in_rank, source_prefix, tokens_per_expert and
  // offsets of `plan`, each expert's rows rounded up to `alignment`, and `plan.received`.
  void exchange_counts(const HighThroughputTokens& tokens, HighThroughputPlan& plan,
                       int32_t alignment);
  // Second half; writes the rest of `plan`.
  void dispatch_rows(const HighThroughputTokens& tokens, const HighThroughputPlan& plan,
                     const HighThroughputReceived& received);
  void dispatch_cached(const HighThroughputTokens& tokens, const HighThroughputPlan& plan,
                       const HighThroughputReceived& received);
  void combine(const HighThroughputOutputs& outputs, const HighThroughputPlan& plan,
               const HighThroughputResult& result);

  // Takes part in a call whose input this rank has found bad, or for which it could not allocate
  // after exchange_counts: the call is void on every rank, and all stay in step.
  void refuse_dispatch(const std::string& reason);
  void refuse_combine(const std::string& reason);

 private:
  void adopt_counts(HighThroughputPlan& plan, int32_t alignment);

  Exchange exchange_;
  // Between the halves of a dispatch: [R, E_l] where the rows of each source and expert begin.
  std::vector<int64_t> first_rows_;
  bool counted_ = false;
};

}  // namespace fanfold
