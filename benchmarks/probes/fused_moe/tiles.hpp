// Which rows every expert has, and in which order clusters of CTAs take the tiles of a grouped
// GEMM.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace fanfold::probe {

enum class Shared : int32_t { nothing, a, b };  // the operand that two CTAs have in common

// The tiles of the CTAs of one cluster; with one CTA only the first counts.
struct alignas(16) Work {
  int32_t row[2], column[2];
  int32_t valid[2];  // rows that belong to the expert, from `row` on
  int32_t expert;
  Shared shared;
};

struct Routing {
  std::vector<int> first_row, rows;  // of each expert
  int total_rows = 0;                // with the padding
  int routed_rows = 0;
};

// Each token goes to `top_k` different experts at random. An expert's rows begin at a multiple of
// `alignment`, or each expert has `slot` rows of memory (masked form).
inline Routing random_routing(int tokens, int experts, int top_k, int alignment, int slot = 0) {
  std::mt19937 random(tokens);
  Routing routing;
  routing.rows.assign(experts, 0);
  std::vector<int> order(experts);
  for (int e = 0; e < experts; ++e) order[e] = e;
  for (int t = 0; t < tokens; ++t)
    for (int k = 0; k < top_k; ++k) {
      std::swap(order[k], order[k + random() % (experts - k)]);
      ++routing.rows[order[k]];
    }
  for (const int rows : routing.rows) {
    routing.first_row.push_back(routing.total_rows);
    routing.total_rows += slot ? slot : (rows + alignment - 1) / alignment * alignment;
    routing.routed_rows += rows;
  }
  return routing;
}

// Expert after expert. Within one, clusters of two CTAs take two blocks of rows that share b; a
// last single block of rows is taken by both, with two blocks of columns that share a. Without
// `pairs_rows` all are taken like that; without `shares` nothing is multicast.
inline std::vector<Work> plan_tiles(const Routing& routing, int columns, int block_m, int block_n,
                                    int cluster, bool shares = true, bool pairs_rows = true) {
  std::vector<Work> plan;
  const int blocks_n = (columns + block_n - 1) / block_n;
  for (size_t e = 0; e < routing.rows.size(); ++e) {
    const int blocks_m = (routing.rows[e] + block_m - 1) / block_m;
    const auto valid = [&](int m) { return std::clamp(routing.rows[e] - m * block_m, 0, block_m); };
    const auto add = [&](int m0, int m1, int n0, int n1, Shared shared) {
      const int row = routing.first_row[e];
      plan.push_back({{row + m0 * block_m, row + m1 * block_m},
                      {n0 * block_n, n1 * block_n},
                      {valid(m0), valid(m1)},
                      static_cast<int32_t>(e),
                      shares ? shared : Shared::nothing});
    };
    const int paired = cluster == 1 ? blocks_m : pairs_rows ? blocks_m / 2 * 2 : 0;
    for (int n = 0; n < blocks_n; ++n)
      for (int m = 0; m < paired; m += cluster)
        add(m, m + cluster - 1, n, n, cluster == 2 ? Shared::b : Shared::nothing);
    for (int n = 0; n < blocks_n; n += 2)
      for (int m = paired; m < blocks_m; ++m) add(m, m, n, n + 1, Shared::a);
  }
  return plan;
}

}  // namespace fanfold::probe
