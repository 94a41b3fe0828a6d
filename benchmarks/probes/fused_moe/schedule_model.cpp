// Checks the schedule on the host, and predicts how long it takes.
//   schedule_model
#include "schedule.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <queue>
#include <set>
#include <tuple>
#include <vector>

#include "tiles.hpp"

namespace fanfold::probe {

constexpr int kClusters = 66;

struct Tables {
  std::vector<uint16_t> first_block{0};
  std::vector<int32_t> rows;
  explicit Tables(const std::vector<int>& counts) : rows(counts.begin(), counts.end()) {
    for (const int count : counts)
      first_block.push_back(first_block.back() + (count + kBlockRows - 1) / kBlockRows);
  }
  Schedule schedule(bool pairs_halves, int groups = 1) const {
    return {first_block.data(), rows.data(), static_cast<int>(rows.size()), 16, 28, groups,
            pairs_halves};
  }
};

void fail(const char* what, int ticket) {
  std::fprintf(stderr, "ticket %d: %s\n", ticket, what);
  std::exit(1);
}

// Every tile is computed once, by tickets in the order of the experts, and both CTAs of a cluster
// agree on what they share.
void check(const Schedule& schedule) {
  std::set<std::tuple<int, int, int>> seen;
  Cursor at[2];
  for (int ticket = 0; ticket < schedule.tickets(); ++ticket) {
    Task pair[2];
    for (int cta = 0; cta < 2; ++cta) {
      pair[cta] = task_of(schedule, ticket, cta, at[cta]);
      const Task& task = pair[cta];
      if (task.valid <= 0) fail("no valid rows", ticket);
      const uint64_t word = packed_task(task, ticket);
      const Task same = unpacked_task(word);
      if (!has_number(word, ticket) || has_number(word, ticket + 1) || same.gemm != task.gemm ||
          same.expert != task.expert || same.row != task.row || same.valid != task.valid ||
          same.column_block != task.column_block || same.shares_weights != task.shares_weights)
        fail("packed and unpacked it is another", ticket);
      if (!seen.emplace(task.gemm, task.row, task.column_block).second) fail("twice", ticket);
      if (task.gemm != (ticket >= schedule.tickets(0))) fail("the wrong GEMM", ticket);
    }
    const bool same_rows = pair[0].row == pair[1].row;
    const bool same_columns = pair[0].column_block == pair[1].column_block;
    if (pair[0].expert != pair[1].expert || same_rows == same_columns ||
        same_columns != pair[0].shares_weights || pair[0].shares_weights != pair[1].shares_weights)
      fail("the CTAs share nothing", ticket);
  }
  const size_t tiles = schedule.first_block[schedule.experts] *
                       static_cast<size_t>(schedule.column_blocks(0) + schedule.column_blocks(1));
  if (seen.size() != tiles) fail("tiles are missing", schedule.tickets());
}

// Microseconds of one K block of 128, and of a tile's begin and end. `weights` is what a cluster's
// share of the memory's bandwidth needs for two blocks of columns; an expert's tiles share it.
struct Costs {
  double full = 0.83, half = 0.48, weights = 1.006, overhead = 1.5;
};

double cost(const Schedule& schedule, int ticket, const Costs& costs) {
  Cursor at;
  double most = 0;
  for (int cta = 0; cta < 2; ++cta) {
    const Task task = task_of(schedule, ticket, cta, at);
    const double weights =
        costs.weights * kBlockRows /
        ((schedule.rows[task.expert] + kBlockRows - 1) / kBlockRows * kBlockRows);
    const double block = std::max(task.valid > kHalfRows ? costs.full : costs.half, weights);
    most = std::max(most, (task.gemm == 0 ? 56 : 16) * block + costs.overhead);
  }
  return most;
}

// The time when the last cluster ends: each takes the next ticket, or every 66th.
double span(const Schedule& schedule, bool dynamic, const Costs& costs) {
  std::vector<double> end(kClusters, 0.0);
  std::priority_queue<std::pair<double, int>, std::vector<std::pair<double, int>>, std::greater<>>
      free;
  for (int c = 0; c < kClusters; ++c) free.emplace(0.0, c);
  for (int ticket = 0; ticket < schedule.tickets(); ++ticket) {
    int cluster = ticket % kClusters;
    if (dynamic) {
      cluster = free.top().second;
      free.pop();
    }
    end[cluster] += cost(schedule, ticket, costs);
    if (dynamic) free.emplace(end[cluster], cluster);
  }
  return *std::max_element(end.begin(), end.end());
}

}  // namespace fanfold::probe

int main() {
  using namespace fanfold::probe;
  for (const std::vector<int>& counts :
       {std::vector<int>{0, 0},
        {1},
        {0, 64, 65, 0, 128, 129, 192, 193, 256, 257, 320, 321, 384},
        {0, 0, 5000, 0},
        {385, 448, 449, 511, 512, 513}})
    for (const bool pairs_halves : {false, true})
      for (const int groups : {1, 2, 7}) check(Tables(counts).schedule(pairs_halves, groups));
  std::printf("%7s %7s %14s %14s %14s %14s\n", "tokens", "hit", "static, old", "static",
              "tickets, old", "tickets");
  for (const int tokens : {8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192}) {
    const auto routing = random_routing(tokens, 64, 8, 128);
    const Tables tables(routing.rows);
    const int hit = static_cast<int>(
        std::count_if(routing.rows.begin(), routing.rows.end(), [](int n) { return n > 0; }));
    std::printf("%7d %7d", tokens, hit);
    for (const bool dynamic : {false, true})
      for (const bool pairs_halves : {true, false}) {
        check(tables.schedule(pairs_halves));
        std::printf(" %14.0f", span(tables.schedule(pairs_halves), dynamic, Costs{}));
      }
    std::printf("\n");
  }
}
