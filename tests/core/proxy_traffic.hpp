// Random traffic between proxies, and what must be true of it at every moment.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "check.hpp"
#include "proxy_world.hpp"

namespace fanfold {

// What a producer does: pushes a command, or a fence or barrier to every thread.
struct Action {
  CommandFields fields;
  int32_t phase;  // of its rank; each phase ends with a fence or a barrier
};

// Each phase counts its data on a counter of its own. Signals count on the last producers' counter.
inline constexpr int32_t kSignalCounter = kBarrierCounter - 1;
inline constexpr int32_t kPhases = 4;

// Bytes of one write: depend on everything about it.
inline std::byte content(int32_t source, int32_t target, int64_t offset) {
  const uint64_t mixed =
      static_cast<uint64_t>(offset * 64 + source * 8 + target + 1) * 0x9e3779b97f4a7c15u;
  const auto value = static_cast<uint8_t>(mixed >> 56);
  return std::byte{value == 0 ? uint8_t{1} : value};  // 0 is memory that nobody wrote
}

// What a consumer knows: once the counter has reached `count`, the first `writes` of the source's
// writes to it, or those of the phase, are in place.
struct Promise {
  int32_t counter;
  uint64_t count;
  size_t first;  // of the writes of this source to this target
  size_t last;   // excluded
  bool seen = false;
};

struct Placed {
  int64_t offset;  // at the target
  int64_t bytes;
};

// All traffic of one pair of ranks.
struct Flow {
  std::vector<Placed> writes;
  std::vector<Promise> promises;
  int64_t sources = 0;  // bytes of the source area in use
  // Where the areas are, of a world whose ranks have memory for rows alone.
  bool from_rows = false;
  bool to_rows = false;
  uint64_t signalled = 0;
  uint64_t expected[kCounters] = {};
};

class Traffic {
 public:
  // Memory of a rank: a source area for each target, then a target area for each source.
  static constexpr int64_t kAreaBytes = 16 * 1024;
  static int64_t memory_bytes(int32_t ranks) { return 2 * ranks * kAreaBytes; }

  Traffic(Random& random, ProxyWorld& world) : world_(world), ranks_(world.ranks()) {
    flows_.resize(static_cast<size_t>(ranks_) * static_cast<size_t>(ranks_));
    actions_.resize(static_cast<size_t>(ranks_));
    next_.resize(static_cast<size_t>(ranks_));
    phase_tickets_.resize(static_cast<size_t>(ranks_));
    pushed_.resize(static_cast<size_t>(ranks_));
    begun_.resize(static_cast<size_t>(ranks_), -1);
    for (Flow& flow : flows_) {
      flow.from_rows = world.has_rows() && random.one_in(2);
      flow.to_rows = world.has_rows() && random.one_in(2);
    }
    std::vector<bool> barriers;
    barriers.reserve(kPhases);
    for (int phase = 0; phase < kPhases; ++phase) barriers.push_back(random.one_in(2));
    barriers.back() = true;
    for (int32_t rank = 0; rank < ranks_; ++rank) plan(random, rank, barriers);
  }

  // Pushes up to `count` of the rank's actions, as far as its rings have room and fences allow.
  void push(int32_t rank, int32_t count) {
    for (; count > 0 && !pushed_all(rank); --count) {
      if (!push_next(rank)) return;
    }
  }
  bool done() const {
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      if (!pushed_all(rank)) return false;
      if (!world_.proxy(rank).passed(phase_tickets_[static_cast<size_t>(rank)])) return false;
    }
    return true;
  }

  // What the consumer on this rank may rely on now.
  void check_promises(int32_t target) {
    for (int32_t source = 0; source < ranks_; ++source) {
      Flow& flow = flow_of(source, target);
      for (Promise& promise : flow.promises) {
        if (promise.seen) continue;
        if (world_.proxy(target).arrived(source, promise.counter) < promise.count) continue;
        promise.seen = true;
        for (size_t i = promise.first; i < promise.last; ++i) {
          check_placed(source, target, flow.writes[i]);
        }
      }
    }
  }

  // At the end: every counter is exact, every byte is in place, and nothing else was written.
  void check_end() {
    for (int32_t target = 0; target < ranks_; ++target) {
      check_promises(target);
      for (int32_t source = 0; source < ranks_; ++source) check_flow(source, target);
      CHECK(world_.proxy(target).failure() == nullptr);
    }
  }

 private:
  Flow& flow_of(int32_t source, int32_t target) {
    return flows_[static_cast<size_t>(int64_t{source} * ranks_ + target)];
  }
  int64_t source_area(int32_t source, int32_t target) {
    return (flow_of(source, target).from_rows ? kRowsApart : 0) + target * kAreaBytes;
  }
  int64_t target_area(int32_t source, int32_t target) {
    return (flow_of(source, target).to_rows ? kRowsApart : 0) + (ranks_ + source) * kAreaBytes;
  }
  bool pushed_all(int32_t rank) const {
    return next_[static_cast<size_t>(rank)] == actions_[static_cast<size_t>(rank)].size();
  }

  void plan(Random& random, int32_t rank, const std::vector<bool>& barriers);
  void plan_write(Random& random, int32_t rank, int32_t target, int32_t phase);
  bool push_next(int32_t rank);
  void check_barrier(int32_t rank, int32_t phase);
  void scribble(int32_t rank, int32_t phase);
  void check_placed(int32_t source, int32_t target, const Placed& placed);
  void check_flow(int32_t source, int32_t target);

  ProxyWorld& world_;
  int32_t ranks_;
  std::vector<Flow> flows_;
  std::vector<std::vector<Action>> actions_;
  std::vector<size_t> next_;
  std::vector<proxy::Tickets> phase_tickets_;  // of the last fence or barrier pushed
  std::vector<int32_t> begun_;  // the phase of the last fence or barrier that was pushed
  std::vector<size_t> pushed_;  // of that fence or barrier, the threads that have it
};

inline void Traffic::plan(Random& random, int32_t rank, const std::vector<bool>& barriers) {
  std::vector<Action>& actions = actions_[static_cast<size_t>(rank)];
  for (int32_t phase = 0; phase < kPhases; ++phase) {
    std::vector<size_t> first(static_cast<size_t>(ranks_));
    for (int32_t target = 0; target < ranks_; ++target) {
      first[static_cast<size_t>(target)] = flow_of(rank, target).writes.size();
    }
    for (int32_t count = random.between(0, 24); count > 0 && ranks_ > 1; --count) {
      const int32_t target = (rank + random.between(1, ranks_ - 1)) % ranks_;
      if (!random.one_in(4)) {
        plan_write(random, rank, target, phase);
        continue;
      }
      // Now and then more than fits into one signal.
      const int32_t amount = random.between(1, random.one_in(8) ? 100'000 : 9);
      Flow& flow = flow_of(rank, target);
      flow.signalled += static_cast<uint64_t>(amount);
      flow.expected[kSignalCounter] = flow.signalled;
      flow.promises.push_back({kSignalCounter, flow.signalled, 0, flow.writes.size()});
      actions.push_back({{.kind = CommandKind::kSignal,
                          .peer = target,
                          .counter = kSignalCounter,
                          .amount = amount},
                         phase});
    }
    for (int32_t target = 0; target < ranks_; ++target) {
      Flow& flow = flow_of(rank, target);
      flow.promises.push_back(
          {phase, flow.expected[phase], first[static_cast<size_t>(target)], flow.writes.size()});
    }
    const bool barrier = barriers[static_cast<size_t>(phase)];
    actions.push_back({{.kind = barrier ? CommandKind::kBarrier : CommandKind::kFence}, phase});
    if (!barrier) continue;
    for (int32_t target = 0; target < ranks_; ++target) {
      if (target != rank) ++flow_of(rank, target).expected[kBarrierCounter];
    }
  }
}

inline void Traffic::plan_write(Random& random, int32_t rank, int32_t target, int32_t phase) {
  Flow& flow = flow_of(rank, target);
  const int64_t area = target_area(rank, target);
  int64_t offset =
      flow.writes.empty() ? 0 : flow.writes.back().offset + flow.writes.back().bytes - area;
  offset = align_up(offset, kCommandUnit);
  // Gaps at either end, so that not all are contiguous.
  if (random.one_in(4)) offset += kCommandUnit;
  int64_t from = align_up(flow.sources, kCommandUnit);
  if (random.one_in(4)) from += kCommandUnit;
  int64_t bytes = random.one_in(10) ? random.between(0, 4000) : random.between(0, 200);
  if (random.one_in(2)) bytes = align_up(bytes, kCommandUnit);
  if (offset + bytes > kAreaBytes || from + bytes > kAreaBytes) return;
  flow.sources = from + bytes;
  ProxyRank& source = world_[rank];
  const int64_t source_offset = source_area(rank, target) + from;
  for (int64_t i = 0; i < bytes; ++i) {
    *source.at(source_offset + i) = content(rank, target, offset + i);
  }
  const int64_t parts = parts_of(bytes, source.proxy->options().part_bytes);
  flow.expected[phase] += static_cast<uint64_t>(parts);
  flow.writes.push_back({area + offset, bytes});
  actions_[static_cast<size_t>(rank)].push_back({{.kind = CommandKind::kWrite,
                                                  .peer = target,
                                                  .counter = phase,
                                                  .bytes = bytes,
                                                  .source = source_offset,
                                                  .target = area + offset},
                                                 phase});
}

// Returns false if a ring is full, or if a fence has to pass first.
inline bool Traffic::push_next(int32_t rank) {
  const auto at = static_cast<size_t>(rank);
  const Action& action = actions_[at][next_[at]];
  proxy::Proxy& proxy = world_.proxy(rank);
  Command command{};
  CHECK(Command::make(action.fields, command) == CommandField::kFits);
  const bool to_all =
      action.fields.kind == CommandKind::kFence || action.fields.kind == CommandKind::kBarrier;
  const auto ring_of = [&](int32_t thread) {
    return Producer(proxy.thread(thread).command_ring());
  };
  if (!to_all) {
    const auto thread = static_cast<int32_t>(action.fields.peer % proxy.options().threads);
    if (!ring_of(thread).try_push(command)) return false;
    ++next_[at];
    return true;
  }
  // Half of the fences are waited for: after them the producer reuses its sources.
  if (pushed_[at] == 0) phase_tickets_[at].clear();
  begun_[at] = action.phase;
  while (std::cmp_less(pushed_[at], proxy.options().threads)) {
    const auto ticket = ring_of(static_cast<int32_t>(pushed_[at])).try_push(command);
    if (!ticket) return false;
    phase_tickets_[at].push_back(*ticket);
    ++pushed_[at];
  }
  if ((action.phase + rank) % 2 == 0) {
    if (!proxy.passed(phase_tickets_[at])) return false;
    if (action.fields.kind == CommandKind::kBarrier) check_barrier(rank, action.phase);
    scribble(rank, action.phase);
  }
  pushed_[at] = 0;
  ++next_[at];
  return true;
}

// After a barrier every rank has come to it, and what it sent before has arrived.
inline void Traffic::check_barrier(int32_t rank, int32_t phase) {
  for (int32_t source = 0; source < ranks_; ++source) {
    CHECK(begun_[static_cast<size_t>(source)] >= phase);
    for (int32_t each = 0; each <= phase; ++each) {
      CHECK_EQ(world_.proxy(rank).arrived(source, each), flow_of(source, rank).expected[each]);
    }
  }
}

// After a fence the sources are the producer's again: nothing of this may reach a target.
inline void Traffic::scribble(int32_t rank, int32_t phase) {
  for (const Action& action : actions_[static_cast<size_t>(rank)]) {
    if (action.fields.kind != CommandKind::kWrite || action.phase > phase) continue;
    std::memset(world_[rank].at(action.fields.source), 0, static_cast<size_t>(action.fields.bytes));
  }
}

inline void Traffic::check_placed(int32_t source, int32_t target, const Placed& placed) {
  for (int64_t i = 0; i < placed.bytes; ++i) {
    const int64_t offset = placed.offset - target_area(source, target) + i;
    CHECK(*world_[target].at(placed.offset + i) == content(source, target, offset));
  }
}

inline void Traffic::check_flow(int32_t source, int32_t target) {
  Flow& flow = flow_of(source, target);
  for (const Promise& promise : flow.promises) CHECK(promise.seen);
  for (int32_t counter = 0; counter < kCounters; ++counter) {
    CHECK_EQ(world_.proxy(target).arrived(source, counter), flow.expected[counter]);
  }
  std::vector<bool> written(static_cast<size_t>(kAreaBytes));
  for (const Placed& placed : flow.writes) {
    check_placed(source, target, placed);
    for (int64_t i = 0; i < placed.bytes; ++i) {
      written[static_cast<size_t>(placed.offset - target_area(source, target) + i)] = true;
    }
  }
  for (int64_t i = 0; i < kAreaBytes; ++i) {
    if (written[static_cast<size_t>(i)]) continue;
    CHECK(*world_[target].at(target_area(source, target) + i) == std::byte{0});
  }
}

}  // namespace fanfold
