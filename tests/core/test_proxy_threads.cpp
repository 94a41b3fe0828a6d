// Proxies with threads of their own, and producers and consumers on others. A thread sanitizer
// finds a hand-off whose memory order is too weak.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/cores.h"
#include "base/error.h"
#include "base/wait.h"
#include "check.hpp"
#include "proxy/proxy.h"
#include "proxy_world.hpp"
#include "ranks.hpp"
#include "scripted_transport.hpp"

using namespace fanfold;
using namespace std::chrono_literals;

namespace {

constexpr int32_t kRanks = 3;
constexpr int32_t kRows = 6;
constexpr int64_t kRowBytes = 400;  // 25 units of 16 bytes
constexpr int64_t kSlot = 512;
constexpr int32_t kConsumed = 3;  // the counter of the consumers' signals
constexpr int64_t kTarget = kRanks * kRows * kSlot;

constexpr WaitPolicy kPatient{.timeout = 30s, .spin = 0ns, .idle = 1ms};

std::byte value_of(int32_t source, int32_t target, int round, int32_t row) {
  return static_cast<std::byte>(source * 71 + target * 31 + round * 13 + row * 5 + 1);
}

void produce(ProxyWorld& world, int32_t rank, int round) {
  proxy::Proxy& proxy = world.proxy(rank);
  for (int32_t row = 0; row < kRows; ++row) {
    for (int32_t target = 0; target < kRanks; ++target) {
      if (target == rank) continue;
      const int64_t source = (int64_t{target} * kRows + row) * kSlot;
      std::memset(world[rank].memory + source, static_cast<int>(value_of(rank, target, round, row)),
                  kRowBytes);
      proxy.push({.kind = CommandKind::kWrite,
                  .peer = target,
                  .counter = round % 2,
                  .bytes = kRowBytes,
                  .source = source,
                  .target = kTarget + (int64_t{rank} * kRows + row) * kSlot});
    }
  }
  // Once these have passed, the sources are free, and no copy can land at the targets any more.
  proxy.wait(proxy.push_all(CommandKind::kFence));
}

// Waits for a counter of every peer.
void await(proxy::Proxy& proxy, int32_t rank, int32_t counter, uint64_t expected) {
  for (int32_t peer = 0; peer < kRanks; ++peer) {
    if (peer == rank) continue;
    const auto arrived = [&] { return proxy.has_arrived(peer, counter, expected); };
    if (!poll_until(arrived, kPatient)) throw std::runtime_error("a counter stayed too low");
  }
}

// Returns how many rows are wrong.
int consume(ProxyWorld& world, int32_t rank, int round) {
  proxy::Proxy& proxy = world.proxy(rank);
  const int64_t parts = kRows * parts_of(kRowBytes, proxy.options().part_bytes);
  await(proxy, rank, round % 2, static_cast<uint64_t>(parts * (round / 2 + 1)));
  int wrong = 0;
  for (int32_t source = 0; source < kRanks; ++source) {
    for (int32_t row = 0; row < kRows && source != rank; ++row) {
      const std::byte* bytes =
          world[rank].memory + kTarget + (int64_t{source} * kRows + row) * kSlot;
      for (int64_t i = 0; i < kRowBytes; ++i) {
        wrong += bytes[i] != value_of(source, rank, round, row) ? 1 : 0;
      }
    }
  }
  for (int32_t source = 0; source < kRanks; ++source) {
    if (source == rank) continue;
    proxy.push({.kind = CommandKind::kSignal, .peer = source, .counter = kConsumed, .amount = 1});
  }
  return wrong;
}

void run_rounds(const loopback::Options& network, int rounds) {
  proxy::ProxyOptions options;
  options.ranks = kRanks;
  options.threads = 2;
  options.ring_slots = 8;
  options.part_bytes = 256;
  options.message_bytes = 1024;
  options.credit = {.messages = 5, .bytes = 2048};
  options.timeout = 30s;
  ProxyWorld world(options, network, 2 * kTarget);
  for (int32_t rank = 0; rank < kRanks; ++rank) world.proxy(rank).start();
  std::atomic<int> wrong = 0;
  on_ranks(kRanks, [&](int32_t rank) {
    proxy::Proxy& proxy = world.proxy(rank);
    for (int round = 0; round < rounds; ++round) {
      const proxy::Proxy::Busy busy(proxy);
      produce(world, rank, round);
      wrong += consume(world, rank, round);
      await(proxy, rank, kConsumed, static_cast<uint64_t>(int64_t{round} + 1));
    }
    proxy.wait(proxy.push_all(CommandKind::kBarrier));
  });
  CHECK_EQ(wrong.load(), 0);
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    world.proxy(rank).stop();
    CHECK(world.proxy(rank).failure() == nullptr);
    CHECK_EQ(world.proxy(rank).stats().barriers, 2u);
  }
}

}  // namespace

TEST(proxy_threads_move_rows_that_producers_overwrite_again) {
  loopback::Options network;
  network.poll_ns = 1000;
  run_rounds(network, 200 / kRoundsShare);
}

TEST(proxy_threads_hold_over_a_hostile_network) {
  loopback::Options network = loopback::Options::hostile(5);
  network.rails = 2;
  run_rounds(network, 30 / kRoundsShare);
}

namespace {

// With a thread each, in a network whose time passes with the polls.
ProxyWorld two_ranks() {
  proxy::ProxyOptions options;
  options.ranks = 2;
  options.threads = 1;
  loopback::Options network;
  network.poll_ns = 1000;
  return ProxyWorld(options, network, 4096);
}

}  // namespace

TEST(proxy_threads_sleep_while_idle_and_wake_for_a_command) {
  ProxyWorld world = two_ranks();
  for (int32_t rank = 0; rank < 2; ++rank) world.proxy(rank).start();
  const auto asleep = [&] { return world.proxy(0).stats().sleeps >= 3; };
  CHECK(poll_until(asleep, kPatient));
  world.proxy(0).push({.kind = CommandKind::kSignal, .peer = 1, .counter = 0, .amount = 1});
  CHECK(poll_until([&] { return world.proxy(1).arrived(0, 0) == 1; }, kPatient));
}

TEST(proxy_threads_nap_while_they_wait_in_vain_and_wake_for_a_command) {
  ProxyWorld world = two_ranks();
  const proxy::Proxy::Busy busy(world.proxy(0));
  for (int32_t rank = 0; rank < 2; ++rank) world.proxy(rank).start();
  CHECK(poll_until([&] { return world.proxy(0).stats().naps >= 3; }, kPatient));
  CHECK_EQ(world.proxy(0).stats().sleeps, 0u);
  world.proxy(0).push({.kind = CommandKind::kSignal, .peer = 1, .counter = 0, .amount = 1});
  CHECK(poll_until([&] { return world.proxy(1).arrived(0, 0) == 1; }, kPatient));
}

// Threads that wait for a peer that never answers end with the proxy.
TEST(proxy_threads_are_released_with_messages_outstanding) {
  proxy::ProxyOptions options;
  options.ranks = 2;
  options.threads = 2;
  options.timeout = 20ms;
  loopback::Options network;
  network.poll_ns = 1000;
  ProxyWorld world(options, network, 4096);
  world.network().cut(0, 1, loopback::Network::kForever);
  world.proxy(0).start();
  world.proxy(0).push({.kind = CommandKind::kWrite, .peer = 1, .bytes = 64});
  CHECK_THROWS(world.proxy(0).wait(world.proxy(0).push_all(CommandKind::kFence)), PeerTimeout);
}

TEST(proxy_refuses_a_core_that_it_may_not_use) {
  proxy::ProxyOptions options;
  options.ranks = 2;
  options.threads = 1;
  options.cores = {1 << 20};
  ProxyWorld world(options, loopback::Options{}, 4096);
  CHECK_THROWS(world.proxy(0).start(), BadArgument);
}

namespace {

// Where the thread runs that polls it.
class NearCores final : public Scripted {
 public:
  explicit NearCores(std::vector<int32_t> cores) : cores_(std::move(cores)) {}

  std::vector<int32_t> cores() const override { return cores_; }
  int32_t poll(std::span<transport::Event>) override {
    cpu_set_t seen;
    if (sched_getaffinity(0, sizeof seen, &seen) == 0) count = CPU_COUNT(&seen);
    return 0;
  }

  std::atomic<int32_t> count = 0;  // of the cores that the thread may run on

 private:
  std::vector<int32_t> cores_;
};

// On how many cores the thread of a proxy may run whose NIC is near `cores`.
int32_t cores_used(const std::vector<int32_t>& cores, int32_t expected) {
  std::vector<std::byte> memory(4096);
  std::vector<uint64_t> counters(kCounters);
  auto owned = std::make_unique<NearCores>(cores);
  const NearCores& transport = *owned;
  std::vector<std::unique_ptr<transport::Transport>> transports;
  transports.push_back(std::move(owned));
  proxy::ProxyOptions options;
  options.ranks = 1;
  options.threads = 1;
  const proxy::ProxyMemory own{.data = memory.data(), .bytes = 4096, .counters = counters};
  proxy::Proxy proxy(options, own, std::move(transports));
  proxy.connect({proxy.address()});
  proxy.start();
  // It polls before it is moved, too.
  static_cast<void>(poll_until([&] { return transport.count == expected; }, kPatient));
  return transport.count;
}

}  // namespace

TEST(proxy_threads_stay_near_their_nic_as_far_as_the_process_may) {
  cpu_set_t allowed;
  CHECK_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
  int32_t last = CPU_SETSIZE - 1;
  while (!CPU_ISSET(static_cast<size_t>(last), &allowed)) --last;
  CHECK_EQ(cores_used({last, CPU_SETSIZE}, 1), 1);
  CHECK_EQ(cores_used({CPU_SETSIZE}, CPU_COUNT(&allowed)), CPU_COUNT(&allowed));
  CHECK_EQ(cores_used({}, CPU_COUNT(&allowed)), CPU_COUNT(&allowed));
}

TEST(cores_are_read_as_the_system_writes_them) {
  CHECK(parse_cores("0-3,8,10-11") == std::vector<int32_t>({0, 1, 2, 3, 8, 10, 11}));
  CHECK(parse_cores("7") == std::vector<int32_t>{7});
  for (const char* malformed : {"", "a", "1-", "-1", "1,,2", "3 ", "1-99999999"}) {
    CHECK(parse_cores(malformed).empty());
  }
  CHECK(cores_of_node(-1).empty());
  CHECK(cores_of_node(1 << 20).empty());
}
