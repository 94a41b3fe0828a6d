// Where the tokens of one rank go: how many to each expert and rank, and which ranks each goes to.
//
// The grid is one cluster. Each of its CTAs counts some of the tokens in its own shared memory, and
// then adds up what all have counted of some of the columns: so one launch does, and the results
// need not be zero before. A warp takes as many whole tokens at a step as it has lanes for their
// top-k entries.
//
// Constants: kRanks, kExperts, kTopK, kWarps, kClusterCtas.
#include "constants.h"
#include "device/cluster.cuh"
#include "device/warp.cuh"
#include "layout/high_throughput_device.h"

namespace fanfold {

inline constexpr int kThreads = kWarps * kWarpLanes;
inline constexpr int kLocalExperts = kExperts / kRanks;
inline constexpr int kColumns = kExperts + kRanks;  // what is counted: experts, then ranks
inline constexpr int kStepTokens = kWarpLanes / kTopK;
inline constexpr int kStepPairs = kStepTokens * kRanks;  // of a token and a rank, row-major
inline constexpr bool kHasFewRanks = kRanks <= kFewRanks;
inline constexpr int kPairsOfLane = kHasFewRanks ? (kStepPairs + kWarpLanes - 1) / kWarpLanes : 1;
// Steps whose entries a warp waits for together: fewer where a step has more tokens.
inline constexpr int kAhead = kPairsOfLane <= 4 ? 8 : kPairsOfLane <= 8 ? 4 : 1;
static_assert(kTopK <= kWarpLanes && kRanks <= kMostRanks);
static_assert(kExperts % kRanks == 0);

struct LayoutShared {
  uint32_t counted[kColumns];  // by this CTA
};

class LayoutCounter {
 public:
  __device__ LayoutCounter(const DispatchLayoutArgs& args, LayoutShared& shared)
      : args_(args), shared_(shared) {}

  __device__ void run() {
    for (int c = thread(); c < kColumns; c += kThreads) shared_.counted[c] = 0;
    __syncthreads();
    wait_for_previous_kernel();
    allow_next_kernel();  // not before, or ever more kernels would wait on SMs of their own
    count();
    cluster_barrier();
    add_up();
    cluster_barrier();
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int cta() { return static_cast<int>(blockIdx.x); }

  __device__ void count() {
    constexpr int kStride = kClusterCtas * kWarps;
    const int64_t steps = ceil_div(args_.tokens, kStepTokens);
    for (int64_t step = cta() * kWarps + warp_; step < steps; step += kAhead * kStride) {
      int64_t entries[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) entries[i] = entry(step + i * kStride);
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (step + i * kStride < steps) take(step + i * kStride, entries[i]);
    }
    if constexpr (!kHasFewRanks) return;
#pragma unroll
    for (int i = 0; i < kPairsOfLane; ++i)
      if (tokens_of_[i] != 0) atomicAdd(&shared_.counted[kExperts + rank_of(i)], tokens_of_[i]);
  }

  // The one of this lane, -1 for none.
  __device__ int64_t entry(int64_t step) const {
    const int64_t at = step * (kStepTokens * kTopK) + lane_;
    const bool is_there = lane_ < kStepTokens * kTopK && at < args_.tokens * kTopK;
    return is_there ? args_.topk_idx[at] : -1;
  }

  __device__ void take(int64_t step, int64_t entry) {
    const bool is_expert = static_cast<uint64_t>(entry) < kExperts;
    const int expert = static_cast<int>(entry);
    if (is_expert) atomicAdd(&shared_.counted[expert], 1u);
    if constexpr (!kHasFewRanks) return take_many(step, is_expert ? expert / kLocalExperts : -1);
    const uint32_t ranks = with_those_behind(is_expert ? 1u << (expert / kLocalExperts) : 0u);
    const int64_t first = step * kStepPairs;
#pragma unroll
    for (int i = 0; i < kPairsOfLane; ++i) {
      const int pair = i * kWarpLanes + lane_;
      const uint32_t of_token = __shfl_sync(kFullWarp, ranks, pair / kRanks * kTopK % kWarpLanes);
      if (pair >= kStepPairs || first + pair >= args_.tokens * kRanks) continue;
      const uint32_t goes = of_token >> rank_of(i) & 1u;
      args_.is_token_in_rank[first + pair] = static_cast<unsigned char>(goes);
      tokens_of_[i] += goes;
    }
  }

  // Of many ranks: the rows of the step's tokens are made zero, then the first entry of each rank
  // that a token names counts and marks it.
  __device__ void take_many(int64_t step, int rank) {
    const int64_t first = step * kStepPairs;
    const int64_t pairs = min(int64_t{kStepPairs}, args_.tokens * kRanks - first);
    for (int64_t pair = lane_; pair < pairs; pair += kWarpLanes)
      args_.is_token_in_rank[first + pair] = 0;
    __syncwarp();  // behind the zeros
    const int pair = rank < 0 ? -1 : lane_ / kTopK * kRanks + rank;
    const uint32_t same = __match_any_sync(kFullWarp, pair);
    if (pair < 0 || (same & lanes_below()) != 0) return;
    atomicAdd(&shared_.counted[kExperts + rank], 1u);
    args_.is_token_in_rank[first + pair] = 1;
  }

  __device__ int rank_of(int i) const { return (i * kWarpLanes + lane_) % kRanks; }

  // The ranks of this entry and of its token's later ones, a bit for each: so the first has all.
  __device__ uint32_t with_those_behind(uint32_t ranks) const {
    const int k = lane_ % kTopK;
#pragma unroll
    for (int reach = 1; reach < kTopK; reach *= 2) {
      const uint32_t behind = __shfl_sync(kFullWarp, ranks, (lane_ + reach) % kWarpLanes);
      if (k + reach < kTopK) ranks |= behind;
    }
    return ranks;
  }

  __device__ void add_up() const {
    constexpr int kShare = (kColumns + kClusterCtas - 1) / kClusterCtas;
    const int begin = cta() * kShare, end = min(begin + kShare, kColumns);
    for (int c = begin + thread(); c < end; c += kThreads) {
      uint32_t all = 0;
#pragma unroll
      for (int other = 0; other < kClusterCtas; ++other)
        all += load_of_cta(&shared_.counted[c], other);
      int32_t* to =
          c < kExperts ? args_.tokens_per_expert + c : args_.tokens_per_rank + c - kExperts;
      *to = static_cast<int32_t>(all);
    }
  }

  const DispatchLayoutArgs& args_;
  LayoutShared& shared_;
  const int warp_ = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane_ = static_cast<int>(threadIdx.x) % kWarpLanes;
  uint32_t tokens_of_[kPairsOfLane]{};  // of the rank of each of this lane's pairs
};

}  // namespace fanfold

namespace fanfold::high_throughput {

__global__ void __cluster_dims__(kClusterCtas, 1, 1) __launch_bounds__(kThreads, 1)
    layout(const __grid_constant__ DispatchLayoutArgs args) {
  LayoutCounter(args, dynamic_shared<LayoutShared>()).run();
}

}  // namespace fanfold::high_throughput
