// Random traffic among proxies over a network that reorders, delays, repeats and stalls.
#include <cstdint>
#include <exception>
#include <iostream>
#include <string>

#include "check.hpp"
#include "proxy_traffic.hpp"
#include "proxy_world.hpp"
#include "ranks.hpp"

using namespace fanfold;

namespace {

struct Setting {
  proxy::ProxyOptions proxy;
  loopback::Options network;
};

Setting draw(Random& random, uint64_t seed) {
  Setting setting{.proxy = {}, .network = loopback::Options::hostile(seed)};
  proxy::ProxyOptions& options = setting.proxy;
  options.ranks = random.between(2, 5);
  options.threads = random.between(1, 3);
  options.ring_slots = int64_t{2} << random.between(0, 5);
  options.part_bytes = int64_t{16} << random.between(0, 4);
  options.message_bytes = options.part_bytes * random.between(1, 8);
  options.credit.messages = random.one_in(3) ? random.between(1, 4) : random.between(1, 128);
  options.credit.bytes = options.part_bytes * random.between(1, 32);
  options.timeout = std::chrono::seconds(10);
  options.first_sequence = random.one_in(2) ? 0 : random.next();
  loopback::Options& network = setting.network;
  network.rails = random.between(1, 3);
  network.writes = random.between(1, 32);
  network.piece_bytes = random.one_in(2) ? 0 : 64;
  network.arrivals_name_peer = random.one_in(2);
  network.lands_without_poll = random.one_in(3);
  if (random.one_in(3)) network.receive_queue = random.between(1, 8);
  if (random.one_in(4)) network.again_one_in = 2;
  if (random.one_in(4)) network.duplicate_one_in = 2;
  return setting;
}

constexpr int64_t kMostSteps = 400'000;

// What each rank is stuck in, for the reader of a failed test.
void describe(ProxyWorld& world) {
  for (int32_t rank = 0; rank < world.ranks(); ++rank) {
    const proxy::Proxy& proxy = world.proxy(rank);
    const proxy::Failure* failure = proxy.failure();
    const proxy::Stats stats = proxy.stats();
    std::cerr << "rank " << rank << ": " << (failure ? failure->text : "no failure") << "; "
              << stats.commands << " commands, " << stats.messages << " messages, "
              << stats.arrivals << " arrivals, " << stats.fences << " fences, " << stats.barriers
              << " barriers" << std::endl;
  }
}

// Each channel counts at both ends what went through it, and a proxy's numbers are sums of those of
// its threads and channels.
void check_counts(ProxyWorld& world) {
  for (int32_t rank = 0; rank < world.ranks(); ++rank) {
    proxy::Stats sum;
    for (int32_t t = 0; t < world.proxy(rank).options().threads; ++t) {
      sum += world.proxy(rank).thread(t).counted().snapshot();
    }
    for (int32_t peer = 0; peer < world.ranks(); ++peer) {
      const auto stats_of = [&](int32_t from, int32_t to) {
        proxy::Proxy& proxy = world.proxy(from);
        return proxy.thread(to % proxy.options().threads).stats_of(to);
      };
      const proxy::Stats ours = stats_of(rank, peer);
      const proxy::Stats theirs = stats_of(peer, rank);
      CHECK_EQ(ours.messages, theirs.arrivals - theirs.duplicates);
      CHECK_EQ(ours.parts, theirs.parts_received);
      CHECK(theirs.reordered < theirs.arrivals || theirs.arrivals == 0);
      sum += ours;
    }
    const proxy::Stats stats = world.proxy(rank).stats();
    for (const proxy::StatsField& each : proxy::kStatsFields) {
      CHECK_EQ(stats.*each.field, sum.*each.field);
    }
  }
}

// Runs the traffic of one seed to its end, and returns the number of steps.
int64_t run(uint64_t seed, proxy::Stats& stats) {
  Random random(seed);
  const Setting setting = draw(random, seed);
  const int64_t bytes = Traffic::memory_bytes(setting.proxy.ranks);
  ProxyWorld world(setting.proxy, setting.network, bytes, random.one_in(2) ? bytes : 0);
  Traffic traffic(random, world);
  int64_t steps = 0;
  for (; !traffic.done(); ++steps) {
    if (steps == kMostSteps) describe(world);
    CHECK(steps < kMostSteps);
    const int32_t rank = random.between(0, world.ranks() - 1);
    if (random.one_in(4)) traffic.push(rank, random.between(1, 20));
    world.step(rank, random.between(0, setting.proxy.threads - 1));
    traffic.check_promises(rank);
  }
  traffic.check_end();
  world.check_credit();
  check_counts(world);
  for (int32_t rank = 0; rank < world.ranks(); ++rank) stats += world.proxy(rank).stats();
  return steps;
}

void run_seeds(uint64_t first, uint64_t count) {
  proxy::Stats stats;
  int64_t steps = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    try {
      steps += run(seed, stats);
    } catch (const check::Failure& failure) {
      // NOLINTNEXTLINE(bugprone-std-exception-baseclass): see Failure.
      throw check::Failure{"seed " + std::to_string(seed) + ": " + failure.message};
    }
  }
  std::cout << "proxy traffic: " << count << " seeds, " << steps << " steps, " << stats.messages
            << " messages, " << stats.duplicates << " duplicates, " << stats.coalesced
            << " commands coalesced, " << stats.retries << " retries, " << stats.stalls
            << " stalls for credit" << std::endl;
  CHECK(stats.messages > 0);
  CHECK(stats.duplicates > 0);
  CHECK(stats.reordered > 0);
  CHECK(stats.coalesced > 0);
  CHECK(stats.retries > 0);
  CHECK(stats.stalls > 0);
  CHECK(stats.fences > 0);
  CHECK(stats.barriers > 0);
}

}  // namespace

TEST(proxy_delivers_everything_once_over_a_hostile_network) { run_seeds(0, 300 / kRoundsShare); }

TEST(long_proxy_delivers_everything_once_over_a_hostile_network) {
  const check::Seeds asked = check::asked_seeds();
  if (asked.count > 0) return run_seeds(asked.first, asked.count);
  run_seeds(1'000'000, 20'000);
}
