#include "memory/wait_counts.h"

#include "base/atomics.h"

namespace fanfold {

WaitCounts::WaitCounts(int32_t ranks)
    : peers_(static_cast<size_t>(ranks) + 1), words_(peers_ * static_cast<size_t>(Phase::kCount)) {}

void WaitCounts::add(Phase phase, int32_t peer, std::chrono::nanoseconds waited, bool failed) {
  Words& words = words_[static_cast<size_t>(phase) * peers_ + static_cast<size_t>(peer + 1)];
  fetch_add_relaxed_system(&words.waits, uint64_t{1});
  fetch_add_relaxed_system(&words.nanoseconds, static_cast<uint64_t>(waited.count()));
  if (failed) fetch_add_relaxed_system(&words.failures, uint64_t{1});
}

std::vector<WaitCount> WaitCounts::all() const {
  std::vector<WaitCount> all;
  for (size_t i = 0; i < words_.size(); ++i) {
    const WaitCount count{.phase = static_cast<Phase>(i / peers_),
                          .peer = static_cast<int32_t>(i % peers_) - 1,
                          .waits = load_relaxed_system(&words_[i].waits),
                          .failures = load_relaxed_system(&words_[i].failures),
                          .nanoseconds = load_relaxed_system(&words_[i].nanoseconds)};
    if (count.waits > 0) all.push_back(count);
  }
  return all;
}

}  // namespace fanfold
