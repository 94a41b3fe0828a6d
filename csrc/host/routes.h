// Which ranks and experts the tokens of a routing go to, and how many of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/array.h"

namespace fanfold {

// Whether `values[k]` occurs before k already. A token goes to an expert once, even if several of
// its top-k entries name the expert.
template <typename T>
bool repeated(const T* values, int32_t k) {
  return std::find(values, values + k, values[k]) != values + k;
}

// The local experts among a token's top-k entries.
class LocalTopK {
 public:
  struct Entry {
    int32_t local;
    float weight;
  };

  LocalTopK(int32_t first_expert, int32_t locals)
      : first_expert_(first_expert), positions_(static_cast<size_t>(locals), kNone) {}

  // Returns each local expert once, in top-k order. Its weight is the sum, in order, over all top-k
  // entries that name it, or 1 without weights. The result is valid until the next call.
  const std::vector<Entry>& of(const int16_t* ids, const float* weights, int32_t top_k);

 private:
  static constexpr int32_t kNone = -1;

  int32_t first_expert_;
  std::vector<int32_t> positions_;  // of each local expert in `entries_`
  std::vector<Entry> entries_;
};

// The routing of one rank's tokens.
struct Routes {
  Array<const int64_t> topk_idx;  // [tokens, top_k], -1 for none
  int32_t tokens;
  int32_t top_k;
  int32_t experts;
  int32_t ranks;
};

struct RouteCounts {
  Array<int32_t> tokens_per_rank;    // [R] tokens with an expert on the rank
  Array<int32_t> tokens_per_expert;  // [E]
  Array<uint8_t> is_token_in_rank;   // [T, R]
  bool count_duplicates;  // count every top-k entry, instead of each expert once per token
};
void count_routes(const Routes& routes, const RouteCounts& counts);

// The ranks that each token goes to.
struct TokenRanks {
  Array<const uint8_t> in_rank;  // [tokens, ranks]
  int32_t tokens;
  int32_t ranks;

  bool goes_to(int32_t token, int32_t rank) const {
    return in_rank[int64_t{token} * ranks + rank] != 0;
  }
  // Whether the token goes to one of these ranks, and the number of tokens that do.
  bool any_of(int32_t token, const std::vector<int32_t>& some) const;
  int64_t count_of(const std::vector<int32_t>& some) const;
  // [ranks] the number of tokens that go to each rank.
  std::vector<int64_t> count() const;
};

}  // namespace fanfold
