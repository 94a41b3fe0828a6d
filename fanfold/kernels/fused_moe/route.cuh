// The head of the fused kernel: every CTA learns how many rows each expert has, and finds the rows
// of its own tokens.
#pragma once

#include "fused_moe/call.cuh"

namespace fanfold::fused_moe {

// In the memory of the stages, before they are used.
struct RouteCounts {
  int before[kExperts], own[kExperts], after[kExperts];  // rows of other CTAs' tokens, and of own
  int own_first[kExperts], ranked[kExperts];
};
static_assert(sizeof(RouteCounts) <= sizeof(Ring));

// From here on CTAs share the count of the routing.
inline constexpr int kSharedCountEntries = 1 << 15;

__device__ __forceinline__ bool is_expert(int64_t index) { return 0 <= index && index < kExperts; }

// Every CTA counts all tokens.
__device__ inline void count_all(RouteCounts& counts, const FusedMoeArgs& args,
                                 const OwnTokens& own) {
  constexpr int kBatch = 8;
  const int entries = args.tokens * kTopK;
  for (int base = threadIdx.x; base < entries; base += kBatch * kThreads) {
    int64_t expert[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      expert[j] = base + j * kThreads < entries ? args.topk_idx[base + j * kThreads] : -1;
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
    add_release_gpu(call.counted(), 1);
    await_count(call, call.counted(), gridDim.x);
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

// By one warp: the tables of the schedule.
__device__ inline void sum_counts(RouteCounts& counts, const Call& call) {
  uint32_t* before = call.before();
  int32_t* rows = call.rows();
  int blocks_before = 0, singles_before = 0, own_before = 0;
  for (int first = 0; first < kExperts; first += kWarpLanes) {
    const int e = first + static_cast<int>(threadIdx.x % kWarpLanes);
    const bool is_there = e < kExperts;
    const int own = is_there ? counts.own[e] : 0;
    const int all = is_there ? counts.before[e] + own + counts.after[e] : 0;
    const int blocks = blocks_of(all);
    int blocks_here, singles_here, own_here;
    const int blocks_below = sum_below(blocks, blocks_here);
    const int singles_below = sum_below(blocks % 2, singles_here);
    const int own_below = sum_below(own, own_here);
    if (is_there) {
      rows[e] = all;
      before[e] =
          BlocksBefore::of(blocks_before + blocks_below, singles_before + singles_below).word;
      counts.own_first[e] = own_before + own_below;
    }
    blocks_before += blocks_here;
    singles_before += singles_here;
    own_before += own_here;
  }
  if (threadIdx.x % kWarpLanes != 0) return;
  before[kExperts] = BlocksBefore::of(blocks_before, singles_before).word;
  call.tail.own_copies = own_before;
  const bool in_groups = blocks_before >= call.args.blocks_for_groups && kSumChunks > 1;
  call.tail.group_blocks =
      in_groups ? (kSumChunks + 1) / 2 * kFusedMoeSumBlocks : kSecondColumnBlocks;
}

__device__ inline void report_index(const FusedMoeArgs& args, uint32_t number, int entry,
                                    int64_t value) {
  const Report report{reported_call(0, 0), number + 1, entry / kTopK,
                      bad_entry(entry % kTopK, value)};
  const uint4 words{report.call, report.epoch, static_cast<uint32_t>(report.first),
                    static_cast<uint32_t>(report.second)};
  store_relaxed_system(
      reinterpret_cast<uint4*>(args.reports + static_cast<int>(ReportKind::kIndex)), words);
}

// The rows of this CTA's tokens, in any order within an expert.
__device__ inline void rank_own_entries(RouteCounts& counts, const Call& call,
                                        const OwnTokens& own) {
  const FusedMoeArgs& args = call.args;
  const int first = own.first * kTopK;
  for (int i = threadIdx.x; i < own.entries(); i += kThreads) {
    const int entry = first + i;
    const int64_t e = args.topk_idx[entry];
    if (!is_expert(e)) {
      args.row_of[entry] = -1;
      if (e != -1) report_index(args, call.number, entry, e);
      continue;
    }
    const int nth = atomicAdd(counts.ranked + e, 1);
    const int row =
        BlocksBefore{call.before()[e]}.blocks() * kFusedMoeBlockRows + counts.before[e] + nth;
    args.row_of[entry] = row;
    args.copies[first + counts.own_first[e] + nth] = {row, entry};
  }
}

// All threads of the CTA; a barrier must follow before other memory of the stages is used.
__device__ inline void route(RouteCounts& counts, const Call& call) {
  const OwnTokens own(call.args.tokens);
  auto* words = reinterpret_cast<int*>(&counts);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(RouteCounts) / 4); i += kThreads)
    words[i] = 0;
  auto* tail = reinterpret_cast<uint32_t*>(&call.tail);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(Tail) / 4); i += kThreads) tail[i] = 0;
  uint32_t* next = call.args.counters[(call.number + 1) % 2];
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < call.at().words();
       i += gridDim.x * kThreads)
    next[i] = 0;
  __syncthreads();
  if (call.args.tokens * kTopK < kSharedCountEntries) {
    count_all(counts, call.args, own);
  } else {
    count_shares(counts, call, own);
  }
  __syncthreads();
  if (threadIdx.x < kWarpLanes) sum_counts(counts, call);
  __syncthreads();
  rank_own_entries(counts, call, own);
  __syncthreads();
}

// ---- rows of tokens -----------------------------------------------------------------------------

inline constexpr int kFirstCopies = kMathWarps;  // of a CTA; the first tiles wait for them

// By one warp: a token's row, its scales and its weight to a row of an expert.
template <int kInFlight>
__device__ inline void copy_row(const Call& call, const FusedMoeCopy& copy) {
  constexpr int kWords = kHidden / 16;
  constexpr int kStep = kInFlight * kWarpLanes;
  constexpr bool kWhole = kWords % kStep == 0;
  const FusedMoeArgs& args = call.args;
  const int lane = threadIdx.x % kWarpLanes;
  const int token = copy.entry / kTopK;
  const auto* from = reinterpret_cast<const uint4*>(args.x + int64_t{token} * kHidden);
  auto* to = reinterpret_cast<uint4*>(args.rows + int64_t{copy.row} * kHidden);
  const float* scales = args.x_scales + token * args.scale_token_stride;
  for (int block = lane; block < kHidden / kBlockDepth; block += kWarpLanes)
    args.a_scales[0][block * args.row_count + copy.row] = scales[block * args.scale_block_stride];
  if (lane == 0) args.row_weights[copy.row] = args.topk_weights[copy.entry];
#pragma unroll 1
  for (int first = lane; first < kWords; first += kStep) {
    uint4 v[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (kWhole || first + j * kWarpLanes < kWords)
        v[j] = load_once(from + first + j * kWarpLanes);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (kWhole || first + j * kWarpLanes < kWords) store_weak(to + first + j * kWarpLanes, v[j]);
  }
  fence_global_and_bulk();
  __syncwarp();
  if (lane == 0) add_release_gpu(call.arrived(copy.row / kFusedMoeHalfRows), 1);
}

// By `warps` warps, of which this is number `warp`: this CTA's copies from `first` to `last`.
// `between` is called after each.
template <int kInFlight, class Between = Nothing>
__device__ inline void copy_rows(const Call& call, int first, int last, int warp, int warps,
                                 const Between& between = {}) {
  const FusedMoeCopy* copies = call.args.copies + OwnTokens(call.args.tokens).first * kTopK;
  for (int i = first + warp; i < min(last, call.tail.own_copies); i += warps) {
    copy_row<kInFlight>(call, copies[i]);
    between();
  }
}

}  // namespace fanfold::fused_moe
