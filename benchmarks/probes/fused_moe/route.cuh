// The head of the fused kernel: every CTA learns how many rows each expert has, finds the rows of
// its own tokens, and copies them to the rows of the experts.
#pragma once

#include "device/memory.cuh"
#include "device/warp.cuh"
#include "schedule.hpp"
#include "stages.cuh"

namespace fanfold::probe {

inline constexpr int kHidden = 7168;
inline constexpr int kIntermediate = 2048;
inline constexpr int kExperts = 64;
inline constexpr int kTopK = 8;
inline constexpr int kMostTokens = 8192;
inline constexpr int kMostRows = kMostTokens * kTopK + kExperts * kBlockRows;
inline constexpr int kTileColumns = 256;
inline constexpr int kFirstColumnBlocks = 2 * kIntermediate / kTileColumns;
inline constexpr int kSecondColumnBlocks = kHidden / kTileColumns;
inline constexpr int kSumColumns = 1024;  // of a token that a warp sums at a time
inline constexpr int kSumChunks = kHidden / kSumColumns;
inline constexpr int kFirstCopies = kMathWarps;  // of a CTA; the first tiles wait for them
inline constexpr int kSharedCountTokens = 4096;  // from here on CTAs share the count of the routing
inline constexpr float kSmallestActivation = 1e-6f;  // of the largest in a block

// Zero before the call, which clears those of the next.
struct Counters {
  uint32_t ticket;
  uint32_t counted;                                      // CTAs that have counted their tokens
  uint32_t arrived[kMostRows / kHalfRows];               // rows of tokens
  uint32_t activated[kMostRows / kHalfRows];             // tiles of the first GEMM
  uint32_t returned[kMostRows / kHalfRows][kSumChunks];  // tiles of the second, by group
};

struct Copy {
  int32_t row, entry;  // an entry of the top-k lists
};

// When a CTA did what; nanoseconds of the GPU.
struct FusedSpan {
  uint64_t begin, routed, first_end, second_end, end;
  int64_t cycles;
};

struct FusedArgs {
  const uint8_t* x;        // [tokens][hidden] e4m3
  const float* x_scales;   // [tokens][hidden / 128]
  const int64_t* experts;  // [tokens][top-k]
  const float* weights;    // [tokens][top-k]
  int tokens;
  const float* w1_scales;  // [experts][2 * intermediate / 128][hidden / 128], gate before up
  const float* w2_scales;  // [experts][hidden / 128][intermediate / 128]
  uint16_t* y;             // [tokens][hidden] bf16

  TensorMap w1, w2;          // {K, columns, experts}, box {128, 128}
  TensorMap a[2], a_low[2];  // rows of both GEMMs: {K, rows, 1}, boxes {128, 64} and {128, 32}
  TensorMap store[2];        // results of both: e4m3 {intermediate, rows}, bf16 {hidden, rows}

  uint8_t* rows;            // [rows][hidden]
  float* a_scales[2];       // [K / 128][rows], of both GEMMs
  float* row_weights;       // [rows]
  const uint16_t* results;  // [rows][hidden] bf16
  int64_t row_count;

  int32_t* counts;  // [CTAs][experts], rows of each CTA's tokens
  int32_t* row_of;  // [tokens][top-k]
  Copy* copies;     // [tokens][top-k], those of a CTA by expert
  Counters* counters;
  Counters* next_counters;
  bool pairs_halves;
  // To place time: rows, or results, are those of an earlier call.
  bool leaves_copies, leaves_sum;
  int second_groups;  // of columns; an even number of column blocks each
  FusedSpan* spans;   // [CTAs]
};

struct OwnTokens {
  int first, last;
  __device__ explicit OwnTokens(int tokens)
      : first(static_cast<int>(int64_t{blockIdx.x} * tokens / gridDim.x)),
        last(static_cast<int>((int64_t{blockIdx.x} + 1) * tokens / gridDim.x)) {}
  __device__ int entries() const { return (last - first) * kTopK; }
};

// In the memory of the stages, before they are used.
struct RouteCounts {
  int before[kExperts], own[kExperts], after[kExperts];
  int own_first[kExperts], ranked[kExperts];
};

// Counters of tiles that are written, from the thread that has stored them to a spare warp: the
// release for the whole GPU takes about a microsecond, which is not to be a warpgroup's.
struct Mailbox {
  static constexpr uint32_t kSlots = 4;
  static constexpr uint32_t kLast = ~0u;
  uint32_t posted, taken, ended;
  uint32_t words[kSlots];  // of the counters
};

struct FusedTail {
  uint64_t tasks[4];
  Mailbox mailboxes[kMathWarpgroups];
  uint32_t next_sum;
  uint16_t first_block[kExperts + 1];
  int32_t rows[kExperts];
};

__device__ inline void await_count(const uint32_t* counter, uint32_t wanted, uint32_t nap_ns = 0) {
  Impatience impatience;
  while (load_acquire_gpu(counter) < wanted) {
    if (impatience.expired()) return;
    if (nap_ns) __nanosleep(nap_ns);
  }
}

// Every CTA counts all tokens.
__device__ inline void count_all(RouteCounts& counts, const FusedArgs& args, const OwnTokens& own) {
  constexpr int kBatch = 8;
  const int entries = args.tokens * kTopK;
  const int step = blockDim.x;
  for (int base = threadIdx.x; base < entries; base += kBatch * step) {
    int expert[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      expert[j] = base + j * step < entries ? static_cast<int>(args.experts[base + j * step]) : -1;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (expert[j] < 0) continue;
      const int token = (base + j * step) / kTopK;
      int* counter = token < own.first  ? counts.before
                     : token < own.last ? counts.own
                                        : counts.after;
      atomicAdd(counter + expert[j], 1);
    }
  }
}

// Every CTA counts its own tokens and reads what the others have counted.
__device__ inline void count_shares(RouteCounts& counts, const FusedArgs& args,
                                    const OwnTokens& own) {
  for (int i = threadIdx.x; i < own.entries(); i += blockDim.x)
    atomicAdd(counts.own + args.experts[own.first * kTopK + i], 1);
  __syncthreads();
  const int expert = threadIdx.x % kExperts;
  const int cta = blockIdx.x;
  if (threadIdx.x < kExperts) args.counts[cta * kExperts + expert] = counts.own[expert];
  __syncthreads();
  if (threadIdx.x == 0) {
    add_release_gpu(&args.counters->counted, 1);
    await_count(&args.counters->counted, gridDim.x);
  }
  __syncthreads();
  int before = 0, after = 0;
  const int step = blockDim.x / kExperts;
#pragma unroll 8
  for (int other = threadIdx.x / kExperts; other < gridDim.x; other += step) {
    const int count = __ldcg(args.counts + other * kExperts + expert);
    if (other < cta) before += count;
    if (other > cta) after += count;
  }
  atomicAdd(counts.before + expert, before);
  atomicAdd(counts.after + expert, after);
}

// By one warp.
__device__ inline void sum_counts(RouteCounts& counts, FusedTail& tail) {
  constexpr int kEach = kExperts / kWarpLanes;
  const int lane = threadIdx.x % kWarpLanes;
  int blocks[kEach], own[kEach];
  int all_blocks = 0, all_own = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int e = lane * kEach + j;
    const int rows = counts.before[e] + counts.own[e] + counts.after[e];
    tail.rows[e] = rows;
    blocks[j] = (rows + kBlockRows - 1) / kBlockRows;
    own[j] = counts.own[e];
    all_blocks += blocks[j];
    all_own += own[j];
  }
  int blocks_before = all_blocks, own_before = all_own;
#pragma unroll
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const int more_blocks = __shfl_up_sync(kFullWarp, blocks_before, distance);
    const int more_own = __shfl_up_sync(kFullWarp, own_before, distance);
    if (lane >= distance) blocks_before += more_blocks, own_before += more_own;
  }
  blocks_before -= all_blocks;
  own_before -= all_own;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int e = lane * kEach + j;
    tail.first_block[e] = static_cast<uint16_t>(blocks_before);
    counts.own_first[e] = own_before;
    blocks_before += blocks[j];
    own_before += own[j];
  }
  if (lane == kWarpLanes - 1) tail.first_block[kExperts] = static_cast<uint16_t>(blocks_before);
}

// The rows of this CTA's tokens, in any order within an expert.
__device__ inline void rank_own_entries(RouteCounts& counts, const FusedTail& tail,
                                        const FusedArgs& args, const OwnTokens& own) {
  const int first = own.first * kTopK;
  for (int i = threadIdx.x; i < own.entries(); i += blockDim.x) {
    const int entry = first + i;
    const int e = static_cast<int>(args.experts[entry]);
    const int nth = atomicAdd(counts.ranked + e, 1);
    const int row = tail.first_block[e] * kBlockRows + counts.before[e] + nth;
    args.row_of[entry] = row;
    args.copies[first + counts.own_first[e] + nth] = {row, entry};
  }
}

// All threads of the CTA; a barrier must follow before other memory of the stages is used.
__device__ inline void route(RouteCounts& counts, FusedTail& tail, const FusedArgs& args) {
  const OwnTokens own(args.tokens);
  auto* words = reinterpret_cast<int*>(&counts);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(RouteCounts) / 4); i += blockDim.x)
    words[i] = 0;
  if (threadIdx.x < 4) tail.tasks[threadIdx.x] = 0;
  if (threadIdx.x < kMathWarpgroups) tail.mailboxes[threadIdx.x] = {};
  if (threadIdx.x == 0) tail.next_sum = 0;
  auto* next = reinterpret_cast<uint32_t*>(args.next_counters);
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < sizeof(Counters) / 4;
       i += gridDim.x * blockDim.x)
    next[i] = 0;
  __syncthreads();
  if (args.tokens < kSharedCountTokens) {
    count_all(counts, args, own);
  } else {
    count_shares(counts, args, own);
  }
  __syncthreads();
  if (threadIdx.x < kWarpLanes) sum_counts(counts, tail);
  __syncthreads();
  rank_own_entries(counts, tail, args, own);
  __syncthreads();
}

// By one warp: a token's row, its scales and its weight to a row of an expert.
template <int kInFlight>
__device__ inline void copy_row(const FusedArgs& args, const Copy& copy) {
  constexpr int kWords = kHidden / 16;
  constexpr int kStep = kInFlight * kWarpLanes;
  static_assert(kWords % kStep == 0);
  const int lane = threadIdx.x % kWarpLanes;
  const int token = copy.entry / kTopK;
  const auto* from = reinterpret_cast<const uint4*>(args.x + int64_t{token} * kHidden) + lane;
  auto* to = reinterpret_cast<uint4*>(args.rows + int64_t{copy.row} * kHidden) + lane;
  const float* scales = args.x_scales + int64_t{token} * (kHidden / 128);
  for (int block = lane; block < kHidden / 128; block += kWarpLanes)
    args.a_scales[0][block * args.row_count + copy.row] = scales[block];
  if (lane == 0) args.row_weights[copy.row] = args.weights[copy.entry];
#pragma unroll 1
  for (int i = 0; i < kWords / kStep; ++i, from += kStep, to += kStep) {
    uint4 v[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) v[j] = load_once(from + j * kWarpLanes);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) store_weak(to + j * kWarpLanes, v[j]);
  }
  fence_global_and_bulk();
  __syncwarp();
  if (lane == 0) add_release_gpu(&args.counters->arrived[copy.row / kHalfRows], 1);
}

// By `warps` warps, of which this is number `warp`: this CTA's copies from `first` to `last`.
// `between` is called after each.
template <int kInFlight, class Between = Nothing>
__device__ inline void copy_rows(const FusedArgs& args, int first, int last, int warp, int warps,
                                 const Between& between = {}) {
  if (args.leaves_copies) return;
  const OwnTokens own(args.tokens);
  const Copy* copies = args.copies + own.first * kTopK;
  for (int i = first + warp; i < min(last, own.entries()); i += warps) {
    copy_row<kInFlight>(args, copies[i]);
    between();
  }
}

}  // namespace fanfold::probe
