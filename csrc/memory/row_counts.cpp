#include "memory/row_counts.h"

namespace fanfold {

void RowCounts::sent(Phase phase, int32_t peer, int64_t rows, int64_t bytes) {
  if (rows == 0) return;
  const std::scoped_lock lock(mutex_);
  Words& words = sent_[{phase, peer}];
  words.rows += static_cast<uint64_t>(rows);
  words.bytes += static_cast<uint64_t>(bytes);
}

void RowCounts::received(int32_t first, std::span<const int32_t> rows) {
  const std::scoped_lock lock(mutex_);
  int32_t expert = first;
  for (const int32_t count : rows) received_[expert++] += static_cast<uint64_t>(count);
}

std::vector<RowCount> RowCounts::all() const {
  const std::scoped_lock lock(mutex_);
  std::vector<RowCount> all;
  all.reserve(sent_.size());
  for (const auto& [key, words] : sent_) {
    all.push_back({key.first, key.second, words.rows, words.bytes});
  }
  return all;
}

std::vector<ExpertRows> RowCounts::of_experts() const {
  const std::scoped_lock lock(mutex_);
  std::vector<ExpertRows> all;
  all.reserve(received_.size());
  for (const auto& [expert, rows] : received_) all.push_back({expert, rows});
  return all;
}

}  // namespace fanfold
