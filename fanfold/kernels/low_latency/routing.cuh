// The routing of a rank's own tokens as its CTAs read it: a token's row by a warp, and for every
// expert, or rank, the tokens that go to it, by a CTA.
#pragma once

#include "low_latency/call.cuh"

namespace fanfold {

// The routing of this rank's tokens.
struct TopKEntries {
  const int64_t* topk_idx;
  const float* topk_weights;  // null: every weight is 1
  int tokens;

  // The k-th entry of the token's row; -1 beyond.
  __device__ int64_t raw(int token, int k) const {
    return k < kTopK && token < tokens ? topk_idx[int64_t{token} * kTopK + k] : -1;
  }
  // The token's k-th expert; -1 for none and for what is no expert.
  __device__ int of(int token, int k) const { return sane(raw(token, k)); }
  __device__ static int sane(int64_t expert) {
    return static_cast<uint64_t>(expert) < kExperts ? static_cast<int>(expert) : -1;
  }
  __device__ float weight(int token, int k) const {
    if (topk_weights == nullptr || k >= kTopK || token >= tokens) return 1.0f;
    return topk_weights[int64_t{token} * kTopK + k];
  }
};

// A token's routing row in a warp: lane k has entry k.
struct TokenEntries {
  int64_t raw;
  float weight;

  __device__ static TokenEntries load(const TopKEntries& entries, int token, int lane) {
    return {entries.raw(token, lane), entries.weight(token, lane)};
  }
};

// The sets of tokens that a source counts: for each rank those of its kCounts.
inline constexpr int kTokenSets = kRanks * kCounts;
__device__ __forceinline__ int set_of_expert(int expert) {
  return kTokenMajor == 0 ? expert : expert / kLocalExperts * kCounts + expert % kLocalExperts;
}
// Of the tokens that bring a row to where those of the expert are: the expert, or its rank.
__device__ __forceinline__ int set_of_rows(int expert) {
  return kTokenMajor == 0 ? expert : expert / kLocalExperts * kCounts + kLocalExperts;
}

// Tokens that a CTA looks at together, as shared memory allows.
inline constexpr int kWindowTokens = kTokenSets <= 1024 ? 128 : 32;

// Tokens of a window: what a token names twice counts once.
struct alignas(kWindowTokens / 8) TokenSet {
  static constexpr int kWords = kWindowTokens / 32;
  uint32_t words[kWords];

  __device__ void add(int token) {
    atomicOr(&words[token % kWindowTokens / 32], 1u << (token % 32));
  }
  __device__ int size() const { return size_below(kWindowTokens); }
  // Of the first `tokens` of the window, of none if that is negative.
  __device__ int size_below(int tokens) const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int bits = min(max(tokens - i * 32, 0), 32);
      count += __popc(bits == 32 ? words[i] : words[i] & ((1u << bits) - 1u));
    }
    return count;
  }
};

// The entries of a window, some for each thread of a CTA.
class Window {
 public:
  // Of the tokens from `first`, before `last`.
  __device__ void load(const TopKEntries& entries, int first, int last) {
    begin_ = first * kTopK + static_cast<int>(threadIdx.x);
    const int end = min(first + kWindowTokens, last) * kTopK;
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      const int at = begin_ + i * kThreads;
      entries_[i] = at < end ? entries.topk_idx[at] : -1;
    }
  }

  // Adds each token to the sets of its experts and, where those count, of their ranks.
  __device__ void add_to(TokenSet* tokens_of) const {
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      const int expert = TopKEntries::sane(entries_[i]);
      if (expert < 0) continue;
      const int token = (begin_ + i * kThreads) / kTopK;
      tokens_of[set_of_expert(expert)].add(token);
      if constexpr (kTokenMajor != 0) tokens_of[set_of_rows(expert)].add(token);
    }
  }

 private:
  static constexpr int kEntries = (kWindowTokens * kTopK + kThreads - 1) / kThreads;

  int begin_;
  int64_t entries_[kEntries];  // as they are: nobody looks at one before it is used
};

// Calls `use(first)` for every window of the tokens before `last`, one at least, while
// `tokens_of[kTokenSets]`, in shared memory, has the tokens of that window. All threads of the CTA
// come, and read the sets until they come to the next barrier. `meanwhile()` is called once, while
// the first window is on its way, with a barrier between it and every use.
template <class Use, class Meanwhile>
__device__ __forceinline__ void for_each_window(const TopKEntries& entries, int last,
                                                TokenSet* tokens_of, Use use, Meanwhile meanwhile) {
  Window window;
  window.load(entries, 0, last);
  meanwhile();
  for (int first = 0;; first += kWindowTokens) {
    for (int i = static_cast<int>(threadIdx.x); i < kTokenSets; i += kThreads) tokens_of[i] = {};
    __syncthreads();
    window.add_to(tokens_of);
    const bool is_last = first + kWindowTokens >= last;
    // The next one is on its way while this one is used.
    if (!is_last) window.load(entries, first + kWindowTokens, last);
    __syncthreads();
    use(first);
    if (is_last) return;
    __syncthreads();
  }
}

}  // namespace fanfold
