// The routing of thousands of tokens per rank, and what follows from it: where rows come from and
// where they belong.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "layout.cuh"

namespace fanfold::probe {

// A row that a rank receives: which one, and its places among the rank's results.
struct Arrival {
  int32_t source, token;
  int32_t first, count;  // in the list of places; token-major the place is the row's own number
};

// One expert's row of an arrival, expert-major.
struct Place {
  int32_t row;
  float weight;
};

struct Traffic {
  int tokens, topk, experts;
  std::vector<int> topk_idx[kRanks];      // [tokens][topk], -1 is no choice
  std::vector<float> weights[kRanks];     // [tokens][topk]
  std::vector<Arrival> arrivals[kRanks];  // at each rank, by source, then token
  std::vector<Place> places[kRanks];      // of the arrivals, in top-k order
  std::vector<int32_t> row_of[kRanks];    // [tokens][kRanks]: number among a rank's arrivals, or -1
  int expert_rows[kRanks] = {};           // expert-major rows of each rank

  // Distinct experts per token, drawn uniformly; a share of the choices is -1.
  Traffic(uint32_t seed, int token_count, int choices, int expert_count, double none)
      : tokens(token_count), topk(choices), experts(expert_count) {
    std::mt19937 random(seed);
    for (int r = 0; r < kRanks; ++r) draw(r, random, none);
    for (int r = 0; r < kRanks; ++r) arrive(r);
  }

  int local_experts() const { return experts / kRanks; }

  // Rows that leave a rank for others, the most of all ranks.
  int most_remote_rows() const {
    int most = 0;
    for (int s = 0; s < kRanks; ++s) {
      int rows = 0;
      for (int t = 0; t < tokens; ++t)
        for (int p = 0; p < kRanks; ++p) rows += p != s && row_of[s][t * kRanks + p] >= 0;
      most = std::max(most, rows);
    }
    return most;
  }

 private:
  void draw(int r, std::mt19937& random, double none) {
    topk_idx[r].assign(tokens * topk, -1);
    weights[r].resize(tokens * topk);
    std::uniform_real_distribution<float> share(0.0f, 1.0f);
    for (auto& w : weights[r]) w = share(random);
    std::vector<int> used(experts, -1);
    for (int t = 0; t < tokens; ++t)
      for (int k = 0; k < topk; ++k) {
        int e;
        do e = static_cast<int>(random() % experts);
        while (used[e] == t);
        used[e] = t;
        if (share(random) >= none) topk_idx[r][t * topk + k] = e;
      }
  }

  void arrive(int rank) {
    const int local = local_experts();
    std::vector<int> next(local, 0);
    each_choice(rank, [&](int, int, int, int e) { ++next[e]; });
    int begin = 0;
    for (int& n : next) begin += std::exchange(n, begin);
    expert_rows[rank] = begin;
    for (auto& rows : row_of)
      if (rows.empty()) rows.assign(tokens * kRanks, -1);
    each_choice(rank, [&](int s, int t, int k, int e) {
      int32_t& row = row_of[s][t * kRanks + rank];
      if (row < 0) {
        row = static_cast<int32_t>(arrivals[rank].size());
        arrivals[rank].push_back({s, t, static_cast<int32_t>(places[rank].size()), 0});
      }
      ++arrivals[rank].back().count;
      places[rank].push_back({next[e]++, weights[s][t * topk + k]});
    });
  }

  template <class Body>
  void each_choice(int rank, const Body& body) {
    const int local = local_experts();
    for (int s = 0; s < kRanks; ++s)
      for (int c = 0; c < tokens * topk; ++c)
        if (const int e = topk_idx[s][c]; e >= 0 && e / local == rank)
          body(s, c / topk, c % topk, e % local);
  }
};

}  // namespace fanfold::probe
