// Sets of ranks as a warp holds them: in one register of each lane, however many ranks there are.
//
// Up to kFewRanks ranks are the bits of one word, the same in all lanes, and every question about
// them is arithmetic. Of more ranks lane w holds the word of ranks 32 w to 32 w + 31, and the lanes
// of a warp ask together.
#pragma once

#include "protocol/call.cuh"

namespace fanfold {

inline constexpr bool kHasFewRanks = kRanks <= kFewRanks;
// Where each lane of a warp sees to a rank, they do so in as many rounds.
inline constexpr int kRankRounds = (kRanks + kWarpLanes - 1) / kWarpLanes;
static_assert(kRankRounds <= kWarpLanes);

// Calls `use(rank)` for the ranks that this thread of `threads`, at least a warp, sees to.
template <class Use>
__device__ __forceinline__ void for_ranks_of(int thread, int threads, const Use& use) {
  if constexpr (kHasFewRanks) {
    if (thread < kRanks) use(thread);
  } else {
    for (int rank = thread; rank < kRanks; rank += threads) use(rank);
  }
}

// Any ranks.
class RankSet {
 public:
  // Those of which `holds(rank)` is true, for ranks below kRanks. All lanes ask together.
  template <class Holds>
  __device__ static RankSet of(const Holds& holds) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    RankSet set;
#pragma unroll 4
    for (int round = 0; round < kRankRounds; ++round) {
      const int rank = round * kWarpLanes + lane;
      const uint32_t word = __ballot_sync(kFullWarp, rank < kRanks && holds(rank));
      if (kHasFewRanks || lane == round) set.word_ = word;
    }
    return set;
  }

  // Those of this set of which `holds(rank)` is true. All lanes ask together.
  template <class Holds>
  __device__ RankSet where(const Holds& holds) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    RankSet set;
    for (int round = 0; round < kRankRounds; ++round) {
      const int rank = round * kWarpLanes + lane;
      const bool is_member = has(rank);
      const uint32_t word = __ballot_sync(kFullWarp, rank < kRanks && is_member && holds(rank));
      if (kHasFewRanks || lane == round) set.word_ = word;
    }
    return set;
  }

  // Of many ranks all lanes ask together, each about a rank of its own.
  __device__ bool has(int rank) const {
    if constexpr (kHasFewRanks) return (word_ >> rank & 1u) != 0;
    return (__shfl_sync(kFullWarp, word_, rank / 32) >> (rank % 32) & 1u) != 0;
  }

  __device__ uint32_t word() const { return word_; }

 private:
  uint32_t word_ = 0;
};

// The ranks of one token. Of many ranks lane k holds the rank of top-k entry k, unless an entry
// before has the same.
class TokenRanks {
 public:
  static constexpr int kNone = -1;

  __device__ explicit TokenRanks(uint32_t word) : word_(word) {}
  __device__ static TokenRanks none() {
    return TokenRanks(kHasFewRanks ? 0u : static_cast<uint32_t>(kNone));
  }

  // `expert` is that of this lane's entry; -1 for none. All lanes ask together.
  __device__ static TokenRanks of(int expert) {
    if constexpr (kHasFewRanks) {
      const uint32_t bit = expert < 0 ? 0u : 1u << (expert / kLocalExperts);
      return TokenRanks(__reduce_or_sync(kFullWarp, bit));
    }
    const int rank = expert < 0 ? kNone : expert / kLocalExperts;
    const uint32_t same = __match_any_sync(kFullWarp, rank);
    return TokenRanks(static_cast<uint32_t>((same & lanes_below()) == 0 ? rank : kNone));
  }

  __device__ TokenRanks among(const RankSet& others) const {
    if constexpr (kHasFewRanks) return TokenRanks(word_ & others.word());
    const int rank = this->rank();
    const bool keeps = others.has(rank < 0 ? 0 : rank);
    return TokenRanks(static_cast<uint32_t>(keeps ? rank : kNone));
  }

  // As it is kept in memory: of few ranks one word for a token, else one for each top-k entry.
  __device__ uint32_t word() const { return word_; }

  // Calls `use(rank)` for each, beginning with `first`, in ascending order and around the end. All
  // lanes of a warp come; of many ranks only.
  template <class Use>
  __device__ void for_each_from(int first, const Use& use) const {
    Cursor cursor(*this, first);
    for (int rank = cursor.next(); rank != kNone; rank = cursor.next()) use(rank);
  }

  // Goes through the ranks in that order.
  class Cursor {
   public:
    __device__ Cursor(const TokenRanks& ranks, int first)
        : first_(first), left_(ranks.rank() < 0 ? kEnd : distance(ranks.rank())) {}

    // kNone behind the last one.
    __device__ int next() {
      const uint32_t nearest = __reduce_min_sync(kFullWarp, left_);
      if (nearest == kEnd) return kNone;
      if (left_ == nearest) left_ = kEnd;
      return (first_ + static_cast<int>(nearest)) % kRanks;
    }

   private:
    static constexpr uint32_t kEnd = ~0u;
    __device__ uint32_t distance(int rank) const {
      return static_cast<uint32_t>(rank - first_ + (rank < first_ ? kRanks : 0));
    }

    const int first_;
    uint32_t left_;  // of this lane's rank; kEnd when it has been
  };

 private:
  __device__ int rank() const { return static_cast<int>(word_); }

  uint32_t word_;
};

// The largest of `values[kRanks]`, in shared memory. All lanes of a warp ask together.
__device__ __forceinline__ int most_of(const int32_t (&values)[kRanks]) {
  int most = 0;
  if constexpr (kHasFewRanks) {
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) most = max(most, values[rank]);
    return most;
  }
  for (int rank = static_cast<int>(threadIdx.x) % kWarpLanes; rank < kRanks; rank += kWarpLanes)
    most = max(most, values[rank]);
  return static_cast<int>(__reduce_max_sync(kFullWarp, static_cast<uint32_t>(most)));
}

}  // namespace fanfold
