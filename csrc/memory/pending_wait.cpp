#include "memory/pending_wait.h"

#include <algorithm>
#include <optional>

#include "base/atomics.h"

namespace fanfold {
namespace {

constexpr uint64_t kWaiting = 1;

struct WaitSnapshot {
  uint64_t sequence;
  int64_t offsets[2];
  uint32_t epoch;
  uint32_t call;
  int32_t phase;
  int32_t peer;
};

bool unchanged(const PendingWait& pending, const WaitSnapshot& snapshot) {
  return load_sequential_system(&pending.sequence) == snapshot.sequence;
}

// Empty if the rank does not wait, or ends its wait during this read.
std::optional<WaitSnapshot> read(const PendingWait& pending) {
  WaitSnapshot snapshot{};
  snapshot.sequence = load_sequential_system(&pending.sequence);
  if (snapshot.sequence % 2 != kWaiting) return std::nullopt;
  for (size_t i = 0; i < 2; ++i) snapshot.offsets[i] = load_acquire_system(&pending.offsets[i]);
  snapshot.epoch = load_acquire_system(&pending.epoch);
  snapshot.call = load_acquire_system(&pending.call);
  snapshot.phase = load_acquire_system(&pending.phase);
  snapshot.peer = load_acquire_system(&pending.peer);
  if (!unchanged(pending, snapshot)) return std::nullopt;
  return snapshot;
}

}  // namespace

void publish(PendingWait& pending, const AwaitedSignal& awaited) {
  store_release_system(&pending.offsets[0], awaited.offset);
  store_release_system(&pending.offsets[1], awaited.alternative);
  store_release_system(&pending.epoch, awaited.epoch);
  store_release_system(&pending.call, awaited.call);
  store_release_system(&pending.phase, static_cast<int32_t>(awaited.phase));
  store_release_system(&pending.peer, awaited.peer);
  // Sequentially consistent, like the reads of the peers' waits that follow: if two ranks wait for
  // each other, the later one sees both waits.
  fetch_add_sequential_system(&pending.sequence, uint64_t{1});
}

void withdraw(PendingWait& pending) { fetch_add_sequential_system(&pending.sequence, uint64_t{1}); }

std::vector<BlockedRank> find_deadlock(const PendingView& view, int32_t rank) {
  std::vector<BlockedRank> chain;
  std::vector<WaitSnapshot> waits;
  const auto in_chain = [&](int32_t other) {
    return std::any_of(chain.begin(), chain.end(),
                       [&](const BlockedRank& blocked) { return blocked.rank == other; });
  };
  for (int32_t next = rank; !in_chain(next); next = waits.back().peer) {
    const std::optional<WaitSnapshot> wait = read(view.pending(next));
    if (!wait || wait->peer < 0 || wait->peer >= view.ranks || wait->peer == next) return {};
    chain.push_back(BlockedRank{next, static_cast<Phase>(wait->phase), wait->call});
    waits.push_back(*wait);
  }
  // All ranks of the chain waited before these loads, so the loads see every signal that they have
  // pushed.
  for (size_t i = 0; i < chain.size(); ++i) {
    for (const int64_t offset : waits[i].offsets) {
      if (reached(view.signal(chain[i].rank, offset).epoch, waits[i].epoch)) return {};
    }
  }
  // If all of them still wait, no rank of the chain was about to push a signal during the loads.
  for (size_t i = 0; i < chain.size(); ++i) {
    if (!unchanged(view.pending(chain[i].rank), waits[i])) return {};
  }
  return chain;
}

}  // namespace fanfold
