// The head of the fused kernel: every rank tells the others how many rows it has for each expert,
// and every CTA finds the places of the rows of its own tokens.
#pragma once

#include "fused_moe/call.cuh"

namespace fanfold::fused_moe {

// In the memory of the stages, before they are used. By expert of all ranks.
struct RouteCounts {
  int before[kExperts], own[kExperts], after[kExperts];  // of the CTAs of this rank
  int all[kExperts];                                     // of all ranks
  int below[kExperts];                                   // of ranks below this one
  int first_block[kExperts];                             // of rows, on the expert's rank
  int first_copy[kExperts], ranked[kExperts];            // of this CTA
};
static_assert(sizeof(RouteCounts) <= sizeof(Ring));

// From here on CTAs share the count of the routing.
inline constexpr int kSharedCountEntries = 1 << 15;

__device__ __forceinline__ bool is_expert(int64_t index) { return 0 <= index && index < kExperts; }

__device__ inline void report(const Call& call, ReportKind kind, int peer, int32_t first,
                              int32_t second) {
  const uint4 words{reported_call(0, peer), call.number + 1, static_cast<uint32_t>(first),
                    static_cast<uint32_t>(second)};
  store_relaxed_system(reinterpret_cast<uint4*>(call.args.reports + static_cast<int>(kind)), words);
}

// ---- rows of this rank --------------------------------------------------------------------------

// Every CTA counts all tokens.
__device__ inline void count_all(RouteCounts& counts, const FusedMoeArgs& args,
                                 const OwnTokens& own) {
  constexpr int kBatch = 8;
  const int entries = args.tokens * kTopK;
  for (int base = threadIdx.x; base < entries; base += kBatch * kThreads) {
    const int64_t* from = args.topk_idx + base;
    int64_t expert[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      expert[j] = base + j * kThreads < entries ? from[j * kThreads] : -1;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (!is_expert(expert[j])) continue;
      const int token = (base + j * kThreads) / kTopK;
      int* counter = token < own.first  ? counts.before
                     : token < own.last ? counts.own
                                        : counts.after;
      atomicAdd(counter + expert[j], 1);
    }
  }
}

// Every CTA counts its own tokens and reads what the others have counted.
__device__ inline void count_shares(RouteCounts& counts, const Call& call, const OwnTokens& own) {
  constexpr int kParts = kThreads > kExperts ? kThreads / kExperts : 1;
  const FusedMoeArgs& args = call.args;
  for (int i = threadIdx.x; i < own.entries(); i += kThreads) {
    const int64_t expert = args.topk_idx[own.first * kTopK + i];
    if (is_expert(expert)) atomicAdd(counts.own + expert, 1);
  }
  __syncthreads();
  const int cta = blockIdx.x;
  for (int expert = threadIdx.x; expert < kExperts; expert += kThreads)
    args.counts[cta * kExperts + expert] = counts.own[expert];
  __syncthreads();
  if (threadIdx.x == 0) {
    add_release_gpu(call.shares_counted(), 1);
    if (!await_count(call, call.shares_counted(), gridDim.x)) call.tail.aborted = 1;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kExperts * kParts; i += kThreads) {
    const int expert = i % kExperts;
    int before = 0, after = 0;
#pragma unroll 8
    for (int other = i / kExperts; other < gridDim.x; other += kParts) {
      const int count = __ldcg(args.counts + other * kExperts + expert);
      if (other < cta) before += count;
      if (other > cta) after += count;
    }
    atomicAdd(counts.before + expert, before);
    atomicAdd(counts.after + expert, after);
  }
}

// ---- rows of all ranks --------------------------------------------------------------------------

__device__ __forceinline__ int64_t counted_at(const Call& call, int source, int expert) {
  const int64_t parity = call.number % 2;
  return call.args.at.counted + ((parity * kRanks + source) * kExperts + expert) * 8;
}

// A CTA for each peer. A rank whose CTAs have not counted takes no part.
__device__ inline void push_counts(const RouteCounts& counts, const Call& call) {
  const bool takes_part = call.args.refused == 0 && call.tail.aborted == 0;
  for (int rank = blockIdx.x; rank < kRanks; rank += gridDim.x) {
    const Peer peer = call.peer(rank);
    for (int e = threadIdx.x; e < kExperts; e += kThreads) {
      const int own = counts.before[e] + counts.own[e] + counts.after[e];
      const uint32_t count = takes_part ? static_cast<uint32_t>(own) : kFusedMoeRefused;
      peer.put(counted_at(call, call.args.rank, e), CountedWord{call.number + 1, count}.encode());
    }
  }
}

// What `source` has counted; waits for it.
__device__ inline CountedWord counted_by(const Call& call, int source, int expert) {
  const auto* word = own_memory<uint64_t>(call.args, counted_at(call, source, expert));
  Patience patience(call, source);
  for (;;) {
    const CountedWord counted = CountedWord::decode(load_relaxed_system(word));
    if (counted.epoch == call.number + 1) return counted;
    if (patience.expired()) return {0, kFusedMoeRefused};
  }
}

// The counts of all ranks. When they are here, all ranks have ended the call before.
__device__ inline void gather_counts(RouteCounts& counts, const Call& call) {
  for (int i = threadIdx.x; i < kRanks * kExperts; i += kThreads) {
    const int source = i / kExperts;
    const int expert = i % kExperts;
    const CountedWord counted = counted_by(call, source, expert);
    if (counted.count == kFusedMoeRefused) {
      call.tail.aborted = 1;
      const bool says = blockIdx.x == 0 && expert == 0 && source != call.args.rank;
      if (says && counted.epoch != 0) report(call, ReportKind::kRefused, source, 0, 0);
      continue;
    }
    const auto rows = static_cast<int>(counted.count);
    if (rows == 0) continue;
    atomicAdd(counts.all + expert, rows);
    if (source < call.args.rank) atomicAdd(counts.below + expert, rows);
  }
}

// ---- places -------------------------------------------------------------------------------------

// The sum of a value of all lanes below this one, and of all.
__device__ inline int sum_below(int value, int& all) {
  const int lane = threadIdx.x % kWarpLanes;
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const int more = __shfl_up_sync(kFullWarp, sum, distance);
    if (lane >= distance) sum += more;
  }
  all = __shfl_sync(kFullWarp, sum, kWarpLanes - 1);
  return sum - value;
}

// By one warp: where the rows of a rank's experts begin, and whether it has groups of columns; of
// this rank also the schedule's tables.
__device__ inline void place_blocks(RouteCounts& counts, const Call& call, int rank) {
  const bool is_own = rank == call.args.rank;
  uint32_t* before = call.before();
  int32_t* rows = call.rows();
  int blocks_before = 0, singles_before = 0, rows_before = 0;
  for (int first = 0; first < kLocalExperts; first += kWarpLanes) {
    const int local = first + static_cast<int>(threadIdx.x % kWarpLanes);
    const bool is_there = local < kLocalExperts;
    const int all = is_there ? counts.all[rank * kLocalExperts + local] : 0;
    const int blocks = blocks_of(all);
    int blocks_here, rows_here, singles_here = 0;
    sum_below(all, rows_here);
    const int blocks_below = sum_below(blocks, blocks_here);
    if (is_there) counts.first_block[rank * kLocalExperts + local] = blocks_before + blocks_below;
    if (is_own) {
      const int singles_below = sum_below(blocks % 2, singles_here);
      if (is_there) {
        rows[local] = all;
        before[local] =
            BlocksBefore::of(blocks_before + blocks_below, singles_before + singles_below).word;
      }
    }
    blocks_before += blocks_here;
    rows_before += rows_here;
    singles_before += singles_here;
  }
  if (threadIdx.x % kWarpLanes != 0) return;
  if (rows_before >= call.args.rows_for_groups && kSumChunks > 1)
    atomicOr(&call.tail.grouped, 1u << rank);
  if (!is_own) return;
  before[kLocalExperts] = BlocksBefore::of(blocks_before, singles_before).word;
}

// By one warp: this CTA's copies in the order in which they are wanted, the first expert of each
// rank before the second ones; each rank begins with itself.
__device__ inline void place_copies(RouteCounts& counts, const Call& call) {
  int copies_before = 0;
  for (int first = 0; first < kExperts; first += kWarpLanes) {
    const int n = first + static_cast<int>(threadIdx.x % kWarpLanes);
    const int e = (call.args.rank + n) % kRanks * kLocalExperts + n / kRanks;
    int copies_here;
    const int copies_below = sum_below(n < kExperts ? counts.own[e] : 0, copies_here);
    if (n < kExperts) counts.first_copy[e] = copies_before + copies_below;
    copies_before += copies_here;
  }
  if (threadIdx.x % kWarpLanes == 0) call.tail.own_copies = copies_before;
}

// The rows of this CTA's tokens, in any order within an expert.
__device__ inline void place_entries(RouteCounts& counts, const Call& call, const OwnTokens& own) {
  const FusedMoeArgs& args = call.args;
  const int first = own.first * kTopK;
  for (int i = threadIdx.x; i < own.entries(); i += kThreads) {
    const int entry = first + i;
    const int64_t index = args.topk_idx[entry];
    if (!is_expert(index)) {
      args.places[entry] = {0, -1};
      if (index != -1)
        report(call, ReportKind::kIndex, 0, entry / kTopK, bad_entry(entry % kTopK, index));
      continue;
    }
    const auto e = static_cast<int>(index);
    const int nth = atomicAdd(counts.ranked + e, 1);
    const int row =
        counts.first_block[e] * kFusedMoeBlockRows + counts.below[e] + counts.before[e] + nth;
    args.places[entry] = {e / kLocalExperts, row};
    args.copies[first + counts.first_copy[e] + nth] = {e / kLocalExperts, row, entry};
  }
}

__device__ inline void clear(RouteCounts& counts, const Call& call) {
  auto* words = reinterpret_cast<int*>(&counts);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(RouteCounts) / 4); i += kThreads)
    words[i] = 0;
  auto* tail = reinterpret_cast<uint32_t*>(&call.tail);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(Tail) / 4); i += kThreads) tail[i] = 0;
  __syncthreads();
}

// The counters of the next call, which are those of the call before this one: not before all ranks
// have ended that.
__device__ inline void clear_next_counters(const Call& call) {
  auto* next = own_memory<uint32_t>(call.args, call.args.at.counters[(call.number + 1) % 2]);
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < call.at().words();
       i += gridDim.x * kThreads)
    next[i] = 0;
}

// All threads of the CTA; a barrier must follow before other memory of the stages is used.
__device__ inline void route(RouteCounts& counts, const Call& call) {
  const OwnTokens own(call.args.tokens);
  clear(counts, call);
  if (call.args.tokens * kTopK < kSharedCountEntries) {
    count_all(counts, call.args, own);
  } else {
    count_shares(counts, call, own);
  }
  __syncthreads();
  if constexpr (kRanks == 1) {
    for (int e = threadIdx.x; e < kExperts; e += kThreads)
      counts.all[e] = counts.before[e] + counts.own[e] + counts.after[e];
  } else {
    push_counts(counts, call);
    gather_counts(counts, call);
    __syncthreads();  // all ranks have ended the call before
  }
  clear_next_counters(call);
  __syncthreads();
  if (call.tail.aborted != 0) {
    for (int e = threadIdx.x; e < kExperts; e += kThreads) counts.all[e] = counts.own[e] = 0;
    __syncthreads();
  }
  constexpr int kWarps = kThreads / kWarpLanes;
  const int warp = threadIdx.x / kWarpLanes;
  for (int rank = warp; rank < kRanks; rank += kWarps) place_blocks(counts, call, rank);
  if (warp == kWarps - 1) place_copies(counts, call);
  __syncthreads();
  if (call.tail.aborted == 0) place_entries(counts, call, own);
  __syncthreads();
}

}  // namespace fanfold::fused_moe
