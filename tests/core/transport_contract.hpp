// The contract of transport.h as tests that every transport runs.
//
//   Ranks make_mine(int32_t ranks, int32_t rails);  // connected to each other: see connect_all
//   TRANSPORT_CONTRACT(mine, make_mine)
//
// One thread drives all ranks, except in `threads_drive_their_ranks`.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "check.hpp"
#include "ranks.hpp"
#include "transport/transport.h"

namespace fanfold::transport::contract {

using Ranks = std::vector<std::unique_ptr<Transport>>;
// Makes `ranks` transports with `rails` rails each, connected to each other.
using Factory = std::function<Ranks(int32_t ranks, int32_t rails)>;

inline constexpr int64_t kMiB = 1 << 20;
inline constexpr std::array<int64_t, 7> kSizes = {0, 1, 16, 4095, 4096, 65536, kMiB};
inline constexpr auto kUntouched = std::byte{0xab};
inline constexpr auto kPoison = std::byte{0xee};  // in a source whose write is complete

inline size_t index(int64_t value) { return static_cast<size_t>(value); }

inline void connect_all(const Ranks& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (size_t peer = 0; peer < ranks.size(); ++peer) {
      if (rank == peer) continue;
      const Code code = ranks[rank]->connect(static_cast<int32_t>(peer), ranks[peer]->address());
      if (code != Code::kOk) check::fail(__FILE__, __LINE__, ranks[rank]->error());
    }
  }
}

// Bounds a loop over polls, so that a transport that loses a write fails its test.
class PollBound {
 public:
  // Call it once in each iteration.
  void check(const char* awaited) {
    if (++polls_ % 256 != 0 || std::chrono::steady_clock::now() < end_) return;
    check::fail(__FILE__, __LINE__, std::string("polled for long without: ") + awaited);
  }

 private:
  int64_t polls_ = 0;
  std::chrono::steady_clock::time_point end_ =
      std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                             std::chrono::duration<double>(kLongTimeoutSeconds));
};

// What the write with this immediate carries: a pattern that no other write has.
inline std::byte payload(uint32_t immediate, int64_t offset) {
  const uint32_t mixed = immediate * 0x9e3779b1u + static_cast<uint32_t>(offset) * 0x85ebca6bu;
  return static_cast<std::byte>((mixed ^ (mixed >> 15)) & 0x7fu);  // not kUntouched or kPoison
}

inline void fill(std::byte* data, uint32_t immediate, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) data[i] = payload(immediate, i);
}

inline bool filled(const std::byte* data, uint32_t immediate, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) {
    if (data[i] != payload(immediate, i)) return false;
  }
  return true;
}

// A write that a test has posted. Its index among all of them is its immediate.
struct Posted {
  int32_t from;
  int32_t to;
  int32_t rail;
  int64_t source_offset;
  int64_t target_offset;
  int64_t bytes;
  bool refused = false;  // with kAgain: it must never arrive
  int64_t arrivals = 0;
  int64_t completions = 0;
};

// Ranks with memory. Every write gets its own unaligned source and target range, with untouched
// bytes around. Every arrival is checked on the spot. A source is poisoned once its write is
// complete.
class World {
 public:
  World(const Factory& make, int32_t ranks, int32_t rails, int64_t bytes)
      : transports(make(ranks, rails)) {
    CHECK_EQ(transports.size(), index(ranks));
    for (int32_t rank = 0; rank < ranks; ++rank) {
      Transport& transport = *transports[index(rank)];
      sources.emplace_back(index(bytes), kUntouched);
      targets.emplace_back(index(bytes), kUntouched);
      sources_used.push_back(0);
      targets_used.push_back(0);
      local.push_back(transport.register_memory(sources.back().data(), bytes));
      remote.push_back(transport.remote(transport.register_memory(targets.back().data(), bytes)));
      if (local.back().index < 0) check::fail(__FILE__, __LINE__, transport.error());
      CHECK_EQ(remote.back().bytes, bytes);
    }
  }

  // Returns false if the transport returns kAgain.
  bool post(int32_t from, int32_t to, int32_t rail, int64_t bytes) {
    const auto immediate = static_cast<uint32_t>(posted.size());
    const auto gap = static_cast<int64_t>(1 + immediate % 7);
    const int64_t source = sources_used[index(from)] + gap;
    const int64_t target = targets_used[index(to)] + gap + 2;
    CHECK(source + bytes < static_cast<int64_t>(sources[index(from)].size()));
    CHECK(target + bytes < static_cast<int64_t>(targets[index(to)].size()));
    fill(&sources[index(from)][index(source)], immediate, bytes);
    const Code code = transports[index(from)]->write(Write{.peer = to,
                                                           .rail = rail,
                                                           .source = local[index(from)],
                                                           .source_offset = source,
                                                           .target = remote[index(to)],
                                                           .target_offset = target,
                                                           .bytes = bytes,
                                                           .immediate = immediate,
                                                           .context = context_of(immediate)});
    if (code == Code::kFailed) check::fail(__FILE__, __LINE__, transports[index(from)]->error());
    if (code == Code::kAgain && !remember_refused) return false;
    posted.push_back(Posted{.from = from,
                            .to = to,
                            .rail = rail,
                            .source_offset = source,
                            .target_offset = target,
                            .bytes = bytes,
                            .refused = code == Code::kAgain});
    if (code == Code::kAgain) return false;
    sources_used[index(from)] = source + bytes;
    targets_used[index(to)] = target + bytes;
    return true;
  }

  // Polls while the transport returns kAgain.
  void post_and_poll(int32_t from, int32_t to, int32_t rail, int64_t bytes) {
    PollBound bound;
    while (!post(from, to, rail, bytes)) {
      poll_all();
      bound.check("room for a write");
    }
  }

  void poll(int32_t rank) {
    std::vector<Event> events(index(span));
    const int32_t count = transports[index(rank)]->poll(events);
    CHECK(count >= 0 && count <= span);
    for (const Event& event : std::span(events).first(index(count))) take(rank, event);
  }

  void poll_all() {
    for (size_t rank = 0; rank < transports.size(); ++rank) {
      if (transports[rank]) poll(static_cast<int32_t>(rank));
    }
  }

  // Polls until every write has arrived and is complete.
  void wait() {
    PollBound bound;
    while (!all_finished()) {
      poll_all();
      bound.check("the arrivals and completions of all writes");
    }
  }

  // Waits, polls a little longer, and checks that memory outside of the writes is untouched.
  void finish() {
    wait();
    for (int i = 0; i < 200; ++i) poll_all();
    check_untouched();
  }

  std::vector<Posted> posted;
  int32_t span = 64;              // events of one poll
  bool remember_refused = false;  // a refused write keeps its immediate
  Ranks transports;
  std::vector<std::vector<std::byte>> sources;
  std::vector<std::vector<std::byte>> targets;
  std::vector<LocalMemory> local;    // of the sources
  std::vector<RemoteMemory> remote;  // of the targets

 private:
  static uint64_t context_of(uint32_t immediate) { return ~uint64_t{immediate}; }

  void take(int32_t rank, const Event& event) {
    if (event.kind == EventKind::kPeerFailed) {
      check::fail(__FILE__, __LINE__, transports[index(rank)]->error());
    }
    const bool arrival = event.kind == EventKind::kArrival;
    const auto immediate = arrival ? event.immediate : static_cast<uint32_t>(~event.context);
    CHECK(immediate < posted.size());
    Posted& write = posted[immediate];
    CHECK(!write.refused);
    CHECK_EQ(event.rail, write.rail);
    arrival ? arrive(rank, event, write) : complete(rank, event, write);
  }

  void arrive(int32_t rank, const Event& event, Posted& write) {
    CHECK_EQ(rank, write.to);
    CHECK(event.peer == -1 || event.peer == write.from);
    CHECK(filled(&targets[index(rank)][index(write.target_offset)], event.immediate, write.bytes));
    // A write may land again, but not once it is complete.
    CHECK(write.arrivals == 0 || write.completions == 0);
    if (++write.arrivals == 1) ++arrived_;
  }

  void complete(int32_t rank, const Event& event, Posted& write) {
    CHECK_EQ(rank, write.from);
    CHECK_EQ(event.context, context_of(static_cast<uint32_t>(~event.context)));
    CHECK_EQ(++write.completions, 1);
    ++completed_;
    std::fill_n(&sources[index(rank)][index(write.source_offset)], write.bytes, kPoison);
  }

  bool all_finished() {
    const auto refused = std::count_if(posted.begin(), posted.end(),
                                       [](const Posted& write) { return write.refused; });
    const auto expected = static_cast<int64_t>(posted.size()) - refused;
    return arrived_ == expected && completed_ == expected;
  }

  void check_untouched() {
    std::vector<std::vector<std::byte>> expected;
    expected.reserve(targets.size());
    for (const auto& target : targets) expected.emplace_back(target.size(), kUntouched);
    for (size_t i = 0; i < posted.size(); ++i) {
      if (posted[i].refused) continue;
      fill(&expected[index(posted[i].to)][index(posted[i].target_offset)], static_cast<uint32_t>(i),
           posted[i].bytes);
    }
    for (size_t rank = 0; rank < targets.size(); ++rank) CHECK(targets[rank] == expected[rank]);
  }

  std::vector<int64_t> sources_used;
  std::vector<int64_t> targets_used;
  int64_t arrived_ = 0;
  int64_t completed_ = 0;
};

// --- Checks -----------------------------------------------------------------------------------

inline void limits_and_addresses(const Factory& make) {
  const Ranks ranks = make(3, 2);
  for (const auto& transport : ranks) {
    CHECK(!transport->name().empty());
    CHECK(transport->error().empty());
    CHECK_EQ(transport->limits().rails, 2);
    CHECK(transport->limits().writes >= 1);
    CHECK(transport->limits().write_bytes >= kMiB);
    CHECK(transport->limits().write_bytes <= 1024 * kMiB);
    CHECK_EQ(transport->address().size(), ranks[0]->address().size());
    CHECK(!transport->address().empty());
  }
}

// Nothing is in flight beside the write, so that a short write or a missing byte has no excuse.
inline void sizes_and_unaligned_offsets(const Factory& make) {
  World world(make, 2, 1, 4 * kMiB);
  for (const int64_t bytes : kSizes) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      world.post_and_poll(0, 1, 0, bytes);
      world.wait();
    }
  }
  world.finish();
}

inline void immediates_arrive_after_their_bytes(const Factory& make) {
  World world(make, 2, 1, 16 * kMiB);
  Random random(1);
  for (int i = 0; i < 200 / kRoundsShare; ++i) {
    const int64_t size = kSizes[index(random.between(0, 6))];
    world.post_and_poll(0, 1, 0, size == kMiB && !random.one_in(4) ? 777 : size);
  }
  world.finish();
}

inline void empty_writes_carry_immediates(const Factory& make) {
  World world(make, 2, 1, kMiB);
  for (int i = 0; i < 1000; ++i) world.post_and_poll(i % 2, 1 - i % 2, 0, 0);
  world.finish();
}

inline void both_directions_at_once(const Factory& make) {
  World world(make, 2, 1, 5 * kMiB);
  for (int i = 0; i < 300 / kRoundsShare; ++i) {
    for (const int32_t from : {0, 1}) world.post_and_poll(from, 1 - from, 0, i * 97);
    if (i % 5 == 0) world.poll_all();
  }
  world.finish();
}

inline void many_peers(const Factory& make) {
  constexpr int32_t kPeers = 8;
  World world(make, kPeers, 1, 2 * kMiB);
  Random random(2);
  for (int i = 0; i < 2000 / kRoundsShare; ++i) {
    const int32_t from = random.between(0, kPeers - 1);
    const int32_t to = (from + random.between(1, kPeers - 1)) % kPeers;
    world.post_and_poll(from, to, 0, random.between(0, 5000));
    if (random.one_in(8)) world.poll(random.between(0, kPeers - 1));
  }
  world.finish();
}

inline void several_rails(const Factory& make) {
  constexpr int32_t kRails = 4;
  World world(make, 3, kRails, 4 * kMiB);
  for (int32_t i = 0; i < 1200 / kRoundsShare; ++i) {
    const int32_t from = i % 3;
    world.post_and_poll(from, (from + 1 + i % 2) % 3, i % kRails, i % 4 == 0 ? 9000 : i);
  }
  world.finish();
}

// Fills every rail of a sender that does not poll.
inline void again_recovers(const Factory& make) {
  World world(make, 2, 2, 4 * kMiB);
  world.remember_refused = true;
  for (int round = 0; round < 3; ++round) {
    for (const int32_t rail : {0, 1}) {
      const int32_t most = world.transports[0]->limits().writes;
      int32_t accepted = 0;
      while (accepted <= most && world.post(0, 1, rail, 64)) ++accepted;
      CHECK(accepted <= most);
      world.post_and_poll(0, 1, rail, 64);
      CHECK(world.transports[0]->error().empty());  // kAgain is no error
    }
    world.finish();
  }
}

inline void small_event_spans_lose_nothing(const Factory& make) {
  for (const int32_t span : {1, 3}) {
    World world(make, 3, 2, kMiB);
    world.span = span;
    for (int32_t i = 0; i < 600 / kRoundsShare; ++i) {
      world.post_and_poll(i % 3, (i + 1) % 3, i % 2, 100);
      for (const auto& transport : world.transports) {
        if (i % 10 == 0) CHECK_EQ(transport->poll({}), 0);
      }
    }
    world.finish();
  }
}

inline void many_small_writes(const Factory& make) {
  World world(make, 2, 1, 2 * kMiB);
  for (int i = 0; i < 100'000 / kRoundsShare; ++i) {
    world.post_and_poll(0, 1, 0, 8);
    if (i % 16 == 0) world.poll_all();
  }
  world.finish();
}

// A rank goes away with writes from it and to it in flight; the others go on.
inline void destruction_with_writes_in_flight(const Factory& make) {
  for (const int32_t polls : {0, 3}) {
    World world(make, 3, 1, 4 * kMiB);
    for (int i = 0; i < 5; ++i) {
      for (const int32_t other : {0, 1}) {
        world.post_and_poll(2, other, 0, 70'000);
        world.post_and_poll(other, 2, 0, 70'000);
      }
    }
    for (int i = 0; i < polls; ++i) world.poll_all();
    world.transports[2].reset();
    std::vector<std::byte>().swap(world.targets[2]);
    std::vector<std::byte>().swap(world.sources[2]);

    const auto first = static_cast<uint32_t>(world.posted.size());
    PollBound bound;
    std::array<Event, 16> events{};
    for (bool sent = false, arrived = false, completed = false; !arrived || !completed;) {
      sent = sent || world.post(0, 1, 0, 5000);
      for (const int32_t rank : {0, 1}) {
        const int32_t count = world.transports[index(rank)]->poll(events);
        for (const Event& event : std::span(events).first(index(count))) {
          if (event.kind == EventKind::kPeerFailed) CHECK_EQ(event.peer, 2);
          arrived |= event.kind == EventKind::kArrival && event.immediate == first;
          completed |= event.kind == EventKind::kCompletion && event.context == ~uint64_t{first};
        }
      }
      bound.check("a write between the ranks that remain");
    }
    const int64_t target = world.posted[first].target_offset;
    CHECK(filled(&world.targets[1][index(target)], first, 5000));
  }
}

// Each of these writes must fail with an error in words.
inline void writes_out_of_bounds_fail(const Factory& make) {
  const auto fails = [&](auto&& change) {
    World world(make, 2, 1, 2 * kMiB);
    Write write{.peer = 1,
                .rail = 0,
                .source = world.local[0],
                .source_offset = 0,
                .target = world.remote[1],
                .target_offset = 0,
                .bytes = 64,
                .immediate = 0,
                .context = 0};
    change(write, world);
    CHECK(world.transports[0]->write(write) == Code::kFailed);
    CHECK(!world.transports[0]->error().empty());
    for (int i = 0; i < 50; ++i) CHECK_EQ(world.transports[1]->poll({}), 0);
    CHECK(std::count(world.targets[1].begin(), world.targets[1].end(), kUntouched) == 2 * kMiB);
  };
  fails([](Write& write, World&) { write.peer = 7; });  // never connected
  fails([](Write& write, World&) { write.peer = -1; });
  fails([](Write& write, World&) { write.rail = 1; });
  fails([](Write& write, World&) { write.rail = -1; });
  fails([](Write& write, World&) { write.bytes = -1; });
  fails([](Write& write, World&) { write.source.index = -1; });
  fails([](Write& write, World&) { write.source.index = 1000; });
  fails([](Write& write, World&) { write.source_offset = 2 * kMiB - 63; });
  fails([](Write& write, World&) { write.source_offset = -1; });
  fails([](Write& write, World&) { write.target_offset = 2 * kMiB - 63; });
  fails([](Write& write, World&) { write.target_offset = -1; });
  fails([](Write& write, World&) { write.target_offset = INT64_MAX - 1; });
  fails([](Write& write, World& world) {
    write.bytes = world.transports[0]->limits().write_bytes + 1;
  });
}

inline void bad_memory_and_addresses_fail(const Factory& make) {
  std::vector<std::byte> memory(64);
  const auto refuses = [&](std::byte* data, int64_t bytes) {
    const Ranks ranks = make(2, 1);
    CHECK_EQ(ranks[0]->register_memory(data, bytes).index, -1);
    CHECK(!ranks[0]->error().empty());
  };
  refuses(nullptr, 64);
  refuses(memory.data(), 0);
  refuses(memory.data(), -1);
  for (const size_t bytes : {size_t{0}, size_t{3}}) {
    const Ranks ranks = make(2, 1);
    CHECK(ranks[0]->connect(9, Address(bytes)) == Code::kFailed);
    CHECK(!ranks[0]->error().empty());
  }
}

namespace threads {

inline constexpr int32_t kThreads = 3;
inline constexpr int64_t kSlot = 256;

struct Shared {
  std::vector<std::vector<std::byte>> sources;
  std::vector<std::vector<std::byte>> targets;
  std::vector<LocalMemory> local;
  std::vector<RemoteMemory> remote;
  std::atomic<int32_t> finished{0};
};

// Sends `count` writes to each peer, and polls until all ranks have what they expect.
class Rank {
 public:
  Rank(Transport& transport, Shared& shared, int32_t rank, int64_t count)
      : transport_(transport), shared_(shared), rank_(rank), count_(count),
        arrived_(index(kThreads * count)) {}

  void run() {
    PollBound bound;
    const int64_t all = (kThreads - 1) * count_;
    int64_t sent = 0;
    bool finished = false;
    while (shared_.finished.load() < kThreads) {
      if (sent < all && post(sent)) ++sent;
      poll();
      if (!finished && arrivals_ == all && completions_ == all) {
        finished = true;
        ++shared_.finished;
      }
      bound.check("all ranks' arrivals and completions");
    }
  }

 private:
  bool post(int64_t number) {
    const auto peer = static_cast<int32_t>((rank_ + 1 + number % (kThreads - 1)) % kThreads);
    const int64_t slot = rank_ * count_ + number / (kThreads - 1);
    const auto immediate = static_cast<uint32_t>(slot);
    fill(&shared_.sources[index(rank_)][index(number * kSlot)], immediate, kSlot);
    const Code code = transport_.write(Write{.peer = peer,
                                             .rail = 0,
                                             .source = shared_.local[index(rank_)],
                                             .source_offset = number * kSlot,
                                             .target = shared_.remote[index(peer)],
                                             .target_offset = slot * kSlot,
                                             .bytes = kSlot,
                                             .immediate = immediate,
                                             .context = static_cast<uint64_t>(number)});
    CHECK(code != Code::kFailed);
    return code == Code::kOk;
  }

  void poll() {
    std::array<Event, 8> events{};
    const int32_t count = transport_.poll(events);
    for (const Event& event : std::span(events).first(index(count))) {
      CHECK(event.kind != EventKind::kPeerFailed);
      if (event.kind == EventKind::kCompletion) {
        ++completions_;
        std::fill_n(&shared_.sources[index(rank_)][event.context * kSlot], kSlot, kPoison);
        continue;
      }
      CHECK(event.immediate < arrived_.size());
      CHECK(filled(&shared_.targets[index(rank_)][event.immediate * index(kSlot)], event.immediate,
                   kSlot));
      if (!arrived_[event.immediate]) ++arrivals_;
      arrived_[event.immediate] = true;
    }
  }

  Transport& transport_;
  Shared& shared_;
  int32_t rank_;
  int64_t count_;
  std::vector<bool> arrived_;
  int64_t arrivals_ = 0;
  int64_t completions_ = 0;
};

}  // namespace threads

inline void threads_drive_their_ranks(const Factory& make) {
  constexpr int64_t kCount = 1000 / kRoundsShare;
  constexpr int64_t kBytes = threads::kThreads * kCount * threads::kSlot;
  const Ranks ranks = make(threads::kThreads, 1);
  threads::Shared shared;
  for (const auto& transport : ranks) {
    std::byte* source = shared.sources.emplace_back(index(kBytes)).data();
    std::byte* target = shared.targets.emplace_back(index(kBytes)).data();
    shared.local.push_back(transport->register_memory(source, kBytes));
    shared.remote.push_back(transport->remote(transport->register_memory(target, kBytes)));
  }
  on_ranks(threads::kThreads,
           [&](int32_t rank) { threads::Rank(*ranks[index(rank)], shared, rank, kCount).run(); });
}

}  // namespace fanfold::transport::contract

// Adds a test for each check, with names that begin with `prefix`.
#define TRANSPORT_CONTRACT_TEST(prefix, name, make) \
  TEST(prefix##_##name) { fanfold::transport::contract::name(make); }

#define TRANSPORT_CONTRACT(prefix, make)                                     \
  TRANSPORT_CONTRACT_TEST(prefix, limits_and_addresses, make)                \
  TRANSPORT_CONTRACT_TEST(prefix, sizes_and_unaligned_offsets, make)         \
  TRANSPORT_CONTRACT_TEST(prefix, immediates_arrive_after_their_bytes, make) \
  TRANSPORT_CONTRACT_TEST(prefix, empty_writes_carry_immediates, make)       \
  TRANSPORT_CONTRACT_TEST(prefix, both_directions_at_once, make)             \
  TRANSPORT_CONTRACT_TEST(prefix, many_peers, make)                          \
  TRANSPORT_CONTRACT_TEST(prefix, several_rails, make)                       \
  TRANSPORT_CONTRACT_TEST(prefix, again_recovers, make)                      \
  TRANSPORT_CONTRACT_TEST(prefix, small_event_spans_lose_nothing, make)      \
  TRANSPORT_CONTRACT_TEST(prefix, many_small_writes, make)                   \
  TRANSPORT_CONTRACT_TEST(prefix, destruction_with_writes_in_flight, make)   \
  TRANSPORT_CONTRACT_TEST(prefix, writes_out_of_bounds_fail, make)           \
  TRANSPORT_CONTRACT_TEST(prefix, bad_memory_and_addresses_fail, make)       \
  TRANSPORT_CONTRACT_TEST(prefix, threads_drive_their_ranks, make)
