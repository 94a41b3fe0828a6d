// Whose rows have not come, where a wait has lasted too long.
#pragma once

#include "fused_moe/route.cuh"

namespace fanfold::fused_moe {

// Rows that a rank has for an expert of this one.
__device__ inline int rows_from(const Call& call, int source, int local) {
  const int expert = call.args.rank * kLocalExperts + local;
  const auto* word = own_memory<uint64_t>(call.args, counted_at(call, source, expert));
  const CountedWord counted = CountedWord::decode(load_relaxed_system(word));
  // A peer may be two calls ahead, where it knows that this one has been given up.
  const bool is_count = counted.epoch == call.number + 1 && counted.count != kFusedMoeRefused;
  return is_count ? static_cast<int>(counted.count) : 0;
}

// Whether rows of a rank for an expert of this one have not come.
__device__ inline bool lacks_rows(const Call& call, int source, int local) {
  int64_t first = int64_t{BlocksBefore{call.before()[local]}.blocks()} * kFusedMoeBlockRows;
  for (int below = 0; below < source; ++below) first += rows_from(call, below, local);
  const int64_t last = min(first + rows_from(call, source, local), call.args.row_count);
  const auto* calls = own_memory<uint32_t>(call.args, call.args.at.row_calls);
  for (int64_t row = first; row < last; ++row)
    if (load_relaxed_system(calls + row) != call.number + 1) return true;
  return false;
}

// The first rank whose rows have not come, this one last; `otherwise` if all have. By one thread,
// once the counts of all ranks are there.
__device__ inline int late_rank(const Call& call, int otherwise) {
  for (int n = 1; n <= kRanks; ++n) {
    const int source = (call.args.rank + n) % kRanks;
    for (int local = 0; local < kLocalExperts; ++local)
      if (lacks_rows(call, source, local)) return source;
  }
  return otherwise;
}

}  // namespace fanfold::fused_moe
