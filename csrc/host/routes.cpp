#include "host/routes.h"

namespace fanfold {

void count_routes(const Routes& routes, const RouteCounts& counts) {
  const int32_t locals = routes.experts / routes.ranks;
  routes.topk_idx.require("topk_idx", int64_t{routes.tokens} * routes.top_k);
  counts.tokens_per_rank.require("tokens_per_rank", routes.ranks);
  counts.tokens_per_expert.require("tokens_per_expert", routes.experts);
  counts.is_token_in_rank.require("is_token_in_rank", int64_t{routes.tokens} * routes.ranks);
  std::fill_n(counts.tokens_per_rank.data(), routes.ranks, 0);
  std::fill_n(counts.tokens_per_expert.data(), routes.experts, 0);
  std::fill_n(counts.is_token_in_rank.data(), int64_t{routes.tokens} * routes.ranks, uint8_t{0});
  std::vector<int32_t> last_token(static_cast<size_t>(routes.experts), -1);
  for (int32_t token = 0; token < routes.tokens; ++token) {
    const int64_t* experts = routes.topk_idx + int64_t{token} * routes.top_k;
    uint8_t* in_rank = counts.is_token_in_rank + int64_t{token} * routes.ranks;
    for (int32_t k = 0; k < routes.top_k; ++k) {
      if (experts[k] < 0) continue;
      int32_t& last = last_token[static_cast<size_t>(experts[k])];
      if (last != token || counts.count_duplicates) ++counts.tokens_per_expert[experts[k]];
      last = token;
      const int64_t rank = experts[k] / locals;
      counts.tokens_per_rank[rank] += 1 - in_rank[rank];
      in_rank[rank] = 1;
    }
  }
}

const std::vector<LocalTopK::Entry>& LocalTopK::of(const int16_t* ids, const float* weights,
                                                   int32_t top_k) {
  const auto locals = static_cast<int32_t>(positions_.size());
  for (const Entry& entry : entries_) positions_[static_cast<size_t>(entry.local)] = kNone;
  entries_.clear();
  for (int32_t k = 0; k < top_k; ++k) {
    const int32_t local = ids[k] - first_expert_;
    if (local < 0 || local >= locals) continue;
    int32_t& position = positions_[static_cast<size_t>(local)];
    if (position == kNone) {
      position = static_cast<int32_t>(entries_.size());
      entries_.push_back(Entry{local, weights == nullptr ? 1.0f : weights[k]});
    } else if (weights != nullptr) {
      entries_[static_cast<size_t>(position)].weight += weights[k];
    }
  }
  return entries_;
}

bool TokenRanks::any_of(int32_t token, const std::vector<int32_t>& some) const {
  return std::ranges::any_of(some, [&](int32_t rank) { return goes_to(token, rank); });
}

int64_t TokenRanks::count_of(const std::vector<int32_t>& some) const {
  int64_t tokens_there = 0;
  for (int32_t token = 0; token < tokens; ++token) tokens_there += any_of(token, some) ? 1 : 0;
  return tokens_there;
}

std::vector<int64_t> TokenRanks::count() const {
  std::vector<int64_t> counts(static_cast<size_t>(ranks), 0);
  for (int64_t place = 0; place < int64_t{tokens} * ranks; ++place) {
    counts[static_cast<size_t>(place % ranks)] += in_rank[place] != 0 ? 1 : 0;
  }
  return counts;
}

}  // namespace fanfold
