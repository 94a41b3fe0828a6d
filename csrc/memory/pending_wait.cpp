#include "memory/pending_wait.h"

#include <algorithm>
#include <optional>

#include "base/atomics.h"

namespace fanfold {
namespace {

constexpr uint64_t kWaiting = 1;

struct Seen {
  uint64_t sequence;
  int64_t offsets[2];
  uint32_t epoch;
  uint32_t call;
  int32_t phase;
  int32_t peer;
};

bool unchanged(const PendingWait& place, const Seen& seen) {
  return load_sequential_system(&place.sequence) == seen.sequence;
}

// Empty if the rank waits for nobody, or goes on this very moment.
std::optional<Seen> read(const PendingWait& place) {
  Seen seen{};
  seen.sequence = load_sequential_system(&place.sequence);
  if (seen.sequence % 2 != kWaiting) return std::nullopt;
  for (size_t i = 0; i < 2; ++i) seen.offsets[i] = load_acquire_system(&place.offsets[i]);
  seen.epoch = load_acquire_system(&place.epoch);
  seen.call = load_acquire_system(&place.call);
  seen.phase = load_acquire_system(&place.phase);
  seen.peer = load_acquire_system(&place.peer);
  if (!unchanged(place, seen)) return std::nullopt;
  return seen;
}

}  // namespace

void publish(PendingWait& place, const Awaited& awaited) {
  store_release_system(&place.offsets[0], awaited.offset);
  store_release_system(&place.offsets[1], awaited.other);
  store_release_system(&place.epoch, awaited.epoch);
  store_release_system(&place.call, awaited.call);
  store_release_system(&place.phase, static_cast<int32_t>(awaited.phase));
  store_release_system(&place.peer, awaited.peer);
  // Sequentially consistent, as is the look at the peers' that follows: of two ranks that wait for
  // each other the later one sees both waits.
  fetch_add_sequential_system(&place.sequence, uint64_t{1});
}

void withdraw(PendingWait& place) { fetch_add_sequential_system(&place.sequence, uint64_t{1}); }

std::vector<Blocked> find_deadlock(const PendingView& view, int32_t rank) {
  std::vector<Blocked> chain;
  std::vector<Seen> waits;
  const auto in_chain = [&](int32_t other) {
    return std::any_of(chain.begin(), chain.end(),
                       [&](const Blocked& blocked) { return blocked.rank == other; });
  };
  for (int32_t next = rank; !in_chain(next); next = waits.back().peer) {
    const std::optional<Seen> wait = read(view.pending(next));
    if (!wait || wait->peer < 0 || wait->peer >= view.ranks || wait->peer == next) return {};
    chain.push_back(Blocked{next, static_cast<Phase>(wait->phase), wait->call});
    waits.push_back(*wait);
  }
  // All of them waited before this look, and what they had pushed before can be seen.
  for (size_t i = 0; i < chain.size(); ++i) {
    for (const int64_t offset : waits[i].offsets) {
      if (reached(view.signal(chain[i].rank, offset).epoch, waits[i].epoch)) return {};
    }
  }
  // All of them still wait, so at the look nobody was about to push anything.
  for (size_t i = 0; i < chain.size(); ++i) {
    if (!unchanged(view.pending(chain[i].rank), waits[i])) return {};
  }
  return chain;
}

}  // namespace fanfold
