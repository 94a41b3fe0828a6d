// A random routing of thousands of tokens per rank, and the rows that each rank receives under it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "harness.cuh"

namespace fanfold::probe {

// A row that a rank receives.
struct Arrival {
  int32_t source, token;
};

struct Traffic {
  int tokens;
  std::vector<Arrival> arrivals[kRanks];  // at each rank, by source, then token
  std::vector<int32_t> row_of[kRanks];    // [tokens][kRanks]: number among a rank's arrivals, or -1

  // Each token chooses `topk` distinct experts, all equally likely.
  Traffic(uint32_t seed, int token_count, int topk, int experts) : tokens(token_count) {
    std::mt19937 random(seed);
    for (auto& rows : row_of) rows.assign(tokens * kRanks, -1);
    for (int s = 0; s < kRanks; ++s) {
      std::vector<int> chosen_by(experts, -1);
      for (int t = 0; t < tokens; ++t)
        for (int k = 0; k < topk; ++k) {
          int e;
          do e = static_cast<int>(random() % experts);
          while (chosen_by[e] == t);
          chosen_by[e] = t;
          row_of[s][t * kRanks + e / (experts / kRanks)] = 0;
        }
      for (int i = 0; i < tokens * kRanks; ++i)
        if (row_of[s][i] == 0) number(s, i / kRanks, i % kRanks);
    }
  }

  // Rows that leave a rank for others, the most of all ranks.
  int most_remote_rows() const {
    int most = 0;
    for (int s = 0; s < kRanks; ++s) {
      int rows = 0;
      for (int i = 0; i < tokens * kRanks; ++i) rows += i % kRanks != s && row_of[s][i] >= 0;
      most = std::max(most, rows);
    }
    return most;
  }

 private:
  void number(int source, int token, int rank) {
    row_of[source][token * kRanks + rank] = static_cast<int32_t>(arrivals[rank].size());
    arrivals[rank].push_back({source, token});
  }
};

}  // namespace fanfold::probe
