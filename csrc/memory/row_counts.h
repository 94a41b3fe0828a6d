// How many rows a rank has sent to each rank, by phase, and its experts have received.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "layout/control.h"

namespace fanfold {

struct RowCount {
  Phase phase;
  int32_t peer;  // may be the rank itself
  uint64_t rows;
  uint64_t bytes;  // of the rows and their scales
};

struct ExpertRows {
  int32_t expert;
  uint64_t rows;
};

// Any thread may count and read.
class RowCounts {
 public:
  void sent(Phase phase, int32_t peer, int64_t rows, int64_t bytes);
  // Rows of the experts from `first` on.
  void received(int32_t first, std::span<const int32_t> rows);

  std::vector<RowCount> all() const;
  std::vector<ExpertRows> of_experts() const;

 private:
  struct Words {
    uint64_t rows = 0;
    uint64_t bytes = 0;
  };
  mutable std::mutex mutex_;
  std::map<std::pair<Phase, int32_t>, Words> sent_;
  std::map<int32_t, uint64_t> received_;  // the number of experts may change
};

}  // namespace fanfold
