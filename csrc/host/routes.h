// What a routing means, counted: which ranks and experts the tokens of a rank go to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/array.h"

namespace fanfold {

// Whether `values[k]` stands before k already: a token goes to an expert once, however often it is
// named.
template <typename T>
bool repeated(const T* values, int32_t k) {
  return std::find(values, values + k, values[k]) != values + k;
}

// The local experts that a token goes to.
class LocalChoices {
 public:
  struct Choice {
    int32_t local;
    float weight;
  };

  LocalChoices(int32_t first_expert, int32_t locals)
      : first_expert_(first_expert), positions_(static_cast<size_t>(locals), kNone) {}

  // Each once, in top-k order; its weight is that of all the places that name it, added in order,
  // or 1 without weights. Valid until the next call.
  const std::vector<Choice>& of(const int16_t* ids, const float* weights, int32_t top_k);

 private:
  static constexpr int32_t kNone = -1;

  int32_t first_expert_;
  std::vector<int32_t> positions_;  // of each local expert in `choices_`
  std::vector<Choice> choices_;
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
  Array<int32_t> tokens_per_rank;    // [R] tokens with an expert there
  Array<int32_t> tokens_per_expert;  // [E]
  Array<uint8_t> is_token_in_rank;   // [T, R]
  bool count_duplicates;  // count an expert as often as a token names it, instead of once
};
void count_routes(const Routes& routes, const RouteCounts& counts);

// Which ranks each token goes to.
struct TokenRanks {
  Array<const uint8_t> in_rank;  // [tokens, ranks]
  int32_t tokens;
  int32_t ranks;

  bool any_but(int32_t token, int32_t rank) const;
  // Tokens that go to another rank than `rank`.
  int64_t count_but(int32_t rank) const;
  // [ranks] tokens that go to each.
  std::vector<int64_t> count() const;
};

}  // namespace fanfold
