// Both modes between hosts give what they give on one host: the tests of one host run again, with
// links between the ranks.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <string_view>
#include <thread>

#include "check.hpp"
#include "host/exchange.h"
#include "host/stream.h"
#include "host/stream_paths.h"
#include "low_latency_world.hpp"

namespace fanfold {
namespace {

// Ranks in different calls wait for each other until the time is up: a rank cannot read what a rank
// on another host waits for.
constexpr std::string_view kOnOneHostOnly[] = {
    "low_latency_a_rank_that_skips_a_combine_is_reported",
    "low_latency_a_rank_that_repeats_a_dispatch_is_reported",
    "low_latency_different_calls_in_hooks_are_reported",
};

bool runs_across_hosts(std::string_view name) {
  return !name.starts_with("low_latency_device") && !name.starts_with("high_throughput_device") &&
         !name.ends_with("_hosts") &&
         std::ranges::find(kOnOneHostOnly, name) == std::end(kOnOneHostOnly);
}

// Runs the tests of one host whose names begin with `prefix`.
void run_tests_on(int32_t hosts, std::string_view prefix, Between between = Between::kSlowLinks) {
  const HostsOfWorlds set(hosts, between);
  int32_t ran = 0;
  for (const check::Test& test : check::tests()) {
    const std::string_view name = test.name;
    if (!runs_across_hosts(name) || !name.starts_with(prefix)) continue;
    try {
      test.body();
    } catch (const check::Failure& failure) {
      // NOLINTNEXTLINE(bugprone-std-exception-baseclass): see Failure.
      throw check::Failure{std::string(name) + ": " + failure.message};
    } catch (const std::exception& error) {
      // NOLINTNEXTLINE(bugprone-std-exception-baseclass): see Failure.
      throw check::Failure{std::string(name) + " throws: " + error.what()};
    }
    ++ran;
  }
  CHECK(ran > 0);
}

// Nobody waits for what a call that is given up has sent, and the next call writes there.
TEST(low_latency_calls_given_up_have_left_between_hosts) {
  const HostsOfWorlds set(2);
  const World world = world_for(small_options(2, 0).geometry);
  const Call call(3, small_options(2, 0));
  on_ranks(2, [&](int32_t rank) {
    static_cast<void>(send(world[rank], call, rank));
    world[rank].reset();
  });
  CHECK_EQ(world.links.size(), 2u);
  for (const auto& link : world.links) CHECK(link->fences() > 0);
}

// A rank that refuses leaves before the end, and the writer goes on until it knows.
TEST(high_throughput_streams_to_ranks_that_have_left_wait_in_each_round_of_the_ring_on_two_hosts) {
  const int64_t bytes = HighThroughputLayout{2}.bytes(int64_t{8} << 10);
  SymmetricOptions options = options_for(2, bytes);
  options.hosts = hosts_for(2, 2);
  const Group group = SymmetricMemory::in_process(options);
  const Links links = separate(group);
  Exchange writes(*group[0], 0, bytes);
  Exchange leaves(*group[1], 0, bytes);
  writes.begin(Phase::kHighThroughputDispatch);
  leaves.begin(Phase::kHighThroughputDispatch);
  leaves.leave();
  const OutgoingPath path = dispatch_to(writes, 1);
  while (writes.chunks(StreamPlace{0, path.readers[0].ack}) != kLeft) std::this_thread::yield();
  const StreamLayout layout = StreamLayout::of(dispatch_ring_bytes(writes), 64, RecordLayout{});
  constexpr int32_t kRounds = 4;
  const int64_t records = int64_t{kRounds} * layout.chunks * layout.records;
  StreamWriter writer(writes, layout, path, records);
  for (int64_t record = 0; record < records; ++record) {
    CHECK(writer.has_room());
    std::memset(writer.next().payload, static_cast<int>(record), 64);
    writer.advance();
  }
  CHECK_EQ(links[0]->fences(), kRounds - 1);
}

// A rank may close its memory right after its last signal.
TEST(memory_delivers_what_was_signalled_before_it_closes_through_proxies) {
  const HostsOfWorlds set(2, Between::kProxies);
  for (int round = 0; round < 20; ++round) {
    SymmetricOptions options = options_for(2, 4096);
    options.hosts = hosts_for(2, 2);
    const Group group = SymmetricMemory::in_process(options);
    const Links links = separate(group);
    on_ranks(2, [&](int32_t rank) {
      if (rank == 0) {
        group[0]->peer(1).signal(0, Signal{1, 0});
      } else {
        CHECK(wait_for_signal(*group[1], Phase::kBarrier, 0, 0, 1));
      }
      group[static_cast<size_t>(rank)]->close();
    });
  }
}

// Another thread reads the numbers while the ranks wait, send and close.
TEST(memory_counts_for_other_threads_until_after_it_closes_through_proxies) {
  const HostsOfWorlds set(2, Between::kProxies);
  SymmetricOptions options = options_for(2, 4096);
  options.hosts = hosts_for(2, 2);
  const Group group = SymmetricMemory::in_process(options);
  const Links links = separate(group);
  std::atomic<bool> reading = true;
  std::atomic<bool> counted = true;
  std::thread reader([&] {
    while (reading) {
      for (const auto& memory : group) {
        if (memory->carrier_counts().empty() || memory->waits().size() > 1) counted = false;
      }
    }
  });
  constexpr uint64_t kRounds = 50;
  on_ranks(2, [&](int32_t rank) {
    for (uint64_t round = 0; round < kRounds; ++round) group[static_cast<size_t>(rank)]->barrier();
    group[static_cast<size_t>(rank)]->close();
  });
  reading = false;
  reader.join();
  CHECK(counted);
  const auto count_of = [&](size_t rank, std::string_view name) {
    uint64_t sum = 0;
    for (const CarrierCount& count : group[rank]->carrier_counts()) {
      if (count.name == name) sum += count.value;
    }
    return sum;
  };
  for (const size_t rank : {size_t{0}, size_t{1}}) {
    CHECK_EQ(count_of(rank, "messages"), kRounds + 1);  // with that of the proxies' barrier
    CHECK_EQ(count_of(rank, "bytes"), 16 * kRounds);
    CHECK_EQ(count_of(rank, "arrivals") - count_of(rank, "duplicates"), kRounds + 1);
    CHECK_EQ(group[rank]->why_lost(1 - static_cast<int32_t>(rank)), "");
  }
}

TEST(low_latency_tests_hold_on_two_hosts) { run_tests_on(2, "low_latency_"); }
TEST(low_latency_tests_hold_on_three_hosts) { run_tests_on(3, "low_latency_random"); }
TEST(high_throughput_tests_hold_on_two_hosts) { run_tests_on(2, "high_throughput_"); }
TEST(high_throughput_tests_hold_on_three_hosts) { run_tests_on(3, "high_throughput_"); }

TEST(long_low_latency_tests_hold_through_proxies_of_two_hosts) {
  run_tests_on(2, "low_latency_", Between::kProxies);
}
TEST(low_latency_goes_on_without_late_peers_through_proxies_of_two_hosts) {
  run_tests_on(2, "low_latency_goes_on", Between::kProxies);
}
TEST(low_latency_tests_hold_through_proxies_of_three_hosts) {
  run_tests_on(3, "low_latency_random", Between::kProxies);
}
TEST(high_throughput_tests_hold_through_proxies_of_two_hosts) {
  run_tests_on(2, "high_throughput_", Between::kProxies);
}
TEST(high_throughput_tests_hold_through_proxies_of_three_hosts) {
  run_tests_on(3, "high_throughput_", Between::kProxies);
}

}  // namespace
}  // namespace fanfold
