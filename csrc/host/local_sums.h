// What this rank returns for the rows that it has received: for each row the sum over its local
// experts, and the numbers of its top-k entries.
#pragma once

#include <cstdint>
#include <vector>

#include "host/high_throughput.h"
#include "host/reduce.h"
#include "layout/high_throughput.h"

namespace fanfold {

// The rows that go back to one source, numbered over all sources.
struct OutgoingRows {
  int64_t next;
  int64_t end;
  int32_t piece = 0;

  bool left() const { return next < end; }
};

class LocalSums {
 public:
  // The columns of one piece of a row.
  struct Columns {
    int64_t begin;
    int64_t count;
  };

  LocalSums(const StreamLayout& layout, const HighThroughputOutputs& outputs,
            const HighThroughputPlan& plan)
      : layout_(layout), outputs_(outputs), plan_(plan) {}

  const HighThroughputPlan& plan() const { return plan_; }
  Columns columns_of(int32_t piece) const;
  bool has_columns() const { return outputs_.hidden > 0; }
  // Writes a piece of the sum for row n to `row`.
  void write(int64_t n, int32_t piece, uint16_t* row);
  float topk_weight(int64_t n, int32_t k) const;

 private:
  void gather(int64_t n, const uint16_t* y, std::vector<ReduceTerm>& terms) const;

  const StreamLayout layout_;
  const HighThroughputOutputs& outputs_;
  const HighThroughputPlan& plan_;
  std::vector<ReduceTerm> terms_;
  std::vector<ReduceTerm> next_terms_;
};

}  // namespace fanfold
