// Faults of networks, peers and producers: each ends in a failure that says what happened, and
// everything is released.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/wait.h"
#include "check.hpp"
#include "layout/immediate.h"
#include "proxy/proxy.h"
#include "proxy_world.hpp"
#include "ranks.hpp"
#include "ring/command.h"
#include "scripted_transport.hpp"

using namespace fanfold;
using namespace std::chrono_literals;
using proxy::FailureReason;

namespace {

constexpr int64_t kBytes = 64 * 1024;

proxy::ProxyOptions options_of(int32_t ranks) {
  proxy::ProxyOptions options;
  options.ranks = ranks;
  options.threads = 1;
  options.part_bytes = 256;
  options.message_bytes = 1024;
  options.timeout = 10ms;  // of the network's time
  return options;
}

constexpr CommandFields write_to(int32_t peer, int64_t bytes = 100, int64_t target = 0) {
  return {
      .kind = CommandKind::kWrite, .peer = peer, .counter = 0, .bytes = bytes, .target = target};
}

// Steps until the rank's proxy has failed, and returns why.
const proxy::Failure& failure_of(ProxyWorld& world, int32_t rank) {
  for (int i = 0; i < 100'000 && world.proxy(rank).failure() == nullptr; ++i) world.step_all();
  const proxy::Failure* failure = world.proxy(rank).failure();
  CHECK(failure != nullptr);
  return *failure;
}

TransportReport transport_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const TransportError& error) {
    return error.report;
  }
  check::fail(__FILE__, __LINE__, "no TransportError");
}

}  // namespace

TEST(proxy_reports_a_peer_that_dies_with_messages_outstanding) {
  ProxyWorld world(options_of(3), quiet_network(), kBytes);
  world.proxy(0).push(write_to(1));
  world.proxy(0).push(write_to(2));
  world.proxy(0).push(write_to(1, 5000, 112));
  world.step(0, 0);
  world.network().kill(1);
  const proxy::Failure& failure = failure_of(world, 0);
  CHECK_EQ(failure.reason, FailureReason::kPeer);
  CHECK_EQ(failure.rank, 0);
  CHECK_EQ(failure.peer, 1);
  CHECK_EQ(failure.messages, 1 + 5);
  CHECK_EQ(failure.bytes, 5100);
  CHECK_EQ(failure.transport, "loopback");
  CHECK(failure.text.find("peer 1 is lost") != std::string::npos);
  const TransportReport report = transport_error([&] { world.proxy(0).check(); });
  CHECK_EQ(report.peer, 1);
  CHECK_EQ(report.messages, 6);
  CHECK_EQ(report.bytes, 5100);
  CHECK_EQ(report.transport, "loopback");
  CHECK_THROWS(world.proxy(0).push(write_to(2)), TransportError);
  // The dead rank's own transport has failed as a whole.
  CHECK_EQ(failure_of(world, 1).reason, FailureReason::kTransport);
  CHECK_EQ(failure_of(world, 1).peer, -1);
}

TEST(proxy_goes_on_without_a_peer_that_ended_with_nothing_outstanding) {
  ProxyWorld world(options_of(3), quiet_network(), kBytes);
  world.proxy(0).push(write_to(1));
  steps(world, 200);
  world.network().kill(1);
  steps(world, 200);
  CHECK(world.proxy(0).failure() == nullptr);
  world.proxy(0).check();
  world.proxy(0).check(2);
  CHECK_EQ(transport_error([&] { world.proxy(0).check(1); }).peer, 1);
  world.proxy(0).push(write_to(2));
  steps(world, 200);
  CHECK_EQ(world.proxy(2).arrived(0, 0), 1u);
  world.proxy(0).push(write_to(1));
  CHECK_EQ(failure_of(world, 0).reason, FailureReason::kPeer);
}

TEST(proxy_gives_up_a_peer_that_dies_if_it_may) {
  proxy::ProxyOptions options = options_of(3);
  options.give_up_peers = true;
  ProxyWorld world(options, quiet_network(), kBytes);
  world.proxy(0).push(write_to(1));
  world.proxy(0).push(write_to(1));  // waits for the first, which has the same target
  world.step(0, 0);
  world.network().kill(1);
  steps(world, 200);
  world.proxy(0).push(write_to(1));
  world.proxy(0).push(write_to(2));
  const proxy::Tickets barrier = world.proxy(0).push_all(CommandKind::kBarrier);
  world.proxy(2).push_all(CommandKind::kBarrier);
  steps(world, 400);
  CHECK(world.proxy(0).failure() == nullptr);
  CHECK(world.proxy(0).lost(1));
  CHECK(!world.proxy(0).lost(2));
  CHECK_EQ(transport_error([&] { world.proxy(0).check(1); }).messages, 2);
  CHECK_EQ(world.proxy(0).stats().dropped, 2u);
  CHECK_EQ(world.proxy(2).arrived(0, 0), 1u);
  CHECK(world.proxy(0).passed(barrier));
}

TEST(proxy_gives_up_a_peer_behind_a_cut_if_it_may) {
  proxy::ProxyOptions options = options_of(2);
  options.give_up_peers = true;
  ProxyWorld world(options, quiet_network(), kBytes);
  world.network().cut(0, 1, 4 * options.timeout.count());
  world.proxy(0).push(write_to(1));
  for (int i = 0; i < 100'000 && !world.proxy(0).lost(1); ++i) world.step_all();
  CHECK_THROWS(world.proxy(0).check(1), PeerTimeout);
  // Acknowledgements that arrive afterwards change nothing.
  world.network().advance(8 * options.timeout.count());
  steps(world, 400);
  CHECK(world.proxy(0).failure() == nullptr);
  CHECK(!world.proxy(0).thread(0).outstanding());
}

TEST(proxy_refuses_stores_outside_of_the_memory) {
  ProxyWorld world(options_of(2), quiet_network(), kBytes);
  CommandFields store{.kind = CommandKind::kStore, .peer = 1, .target = kBytes - 8, .word = 7};
  world.proxy(0).push(store);
  steps(world, 200);
  uint64_t stored = 0;
  std::memcpy(&stored, world[1].memory + kBytes - 8, 8);
  CHECK_EQ(stored, 7u);
  store.target = kBytes;
  CHECK_THROWS(world.proxy(0).push(store), BadArgument);
}

// What a peer sent before it ended may be consumed afterwards.
TEST(proxy_delivers_what_a_peer_sent_before_it_ended) {
  ProxyWorld world(options_of(2), quiet_network(), kBytes);
  world.proxy(1).push(write_to(0));
  steps(world, 200);
  world.network().kill(1);
  steps(world, 200);
  CHECK(world.proxy(0).has_arrived(1, 0, 1));
  CHECK_THROWS(world.proxy(0).has_arrived(1, 0, 2), TransportError);
}

TEST(proxy_times_out_where_a_link_is_cut) {
  ProxyWorld world(options_of(2), quiet_network(), kBytes);
  world.network().cut(0, 1, loopback::Network::kForever);
  world.proxy(0).push(write_to(1));
  const proxy::Failure& failure = failure_of(world, 0);
  CHECK_EQ(failure.reason, FailureReason::kTimeout);
  CHECK_EQ(failure.peer, 1);
  CHECK_EQ(failure.messages, 1);
  CHECK_EQ(failure.bytes, 100);
  CHECK(failure.seconds >= 0.010 && failure.seconds < 0.015);
  try {
    world.proxy(0).check();
    CHECK(false);
  } catch (const PeerTimeout& timeout) {
    CHECK_EQ(timeout.report.rank, 0);
    CHECK_EQ(timeout.report.peer, 1);
    CHECK_EQ(timeout.report.phase, "proxy: acknowledgement of 1 messages");
    CHECK_EQ(timeout.report.expected, 1);
    CHECK(timeout.report.seconds >= 0.010);
  }
  CHECK(world.proxy(1).failure() == nullptr);
}

TEST(proxy_survives_a_cut_that_is_shorter_than_the_timeout) {
  ProxyWorld world(options_of(2), quiet_network(), kBytes);
  world.network().cut(0, 1, 9'000'000);
  world.proxy(0).push(write_to(1));
  steps(world, 20'000);
  CHECK(world.proxy(0).failure() == nullptr);
  CHECK_EQ(world.proxy(1).arrived(0, 0), 1u);
}

// A rank that ends does not step any more, so what it owes its peers has to be on its way before.
TEST(proxy_ends_behind_a_barrier_without_holding_up_its_peers) {
  for (const uint64_t seed : {0u, 1u, 2u, 3u, 4u, 5u, 6u, 7u}) {
    loopback::Options network = seed == 0 ? quiet_network() : loopback::Options::hostile(seed);
    network.poll_ns = 1'000;
    ProxyWorld world(options_of(3), network, kBytes);
    std::vector<proxy::Tickets> barriers;
    barriers.reserve(static_cast<size_t>(world.ranks()));
    for (int32_t rank = 0; rank < world.ranks(); ++rank) {
      barriers.push_back(world.proxy(rank).push_all(CommandKind::kBarrier));
    }
    std::vector<bool> ended(barriers.size());
    for (int i = 0; i < 20'000; ++i) {
      for (int32_t rank = 0; rank < world.ranks(); ++rank) {
        const auto index = static_cast<size_t>(rank);
        if (!ended[index]) world.step(rank, 0);
        ended[index] = world.proxy(rank).passed(barriers[index]);
      }
    }
    CHECK(std::find(ended.begin(), ended.end(), false) == ended.end());
  }
}

TEST(proxy_does_not_wait_for_ever_to_acknowledge_a_barrier) {
  ProxyWorld world(options_of(2), quiet_network(), kBytes);
  world.proxy(0).push_all(CommandKind::kBarrier);
  steps(world, 100);  // rank 1 has acknowledged rank 0's signal
  world.proxy(1).push_all(CommandKind::kBarrier);
  while (world.proxy(0).arrived(1, kBarrierCounter) == 0) world.step_all();
  world.network().cut(0, 1, loopback::Network::kForever);
  const proxy::Failure& failure = failure_of(world, 0);
  CHECK_EQ(failure.reason, FailureReason::kBarrier);
  CHECK_EQ(failure.peer, 1);
  CHECK_EQ(failure.text, "proxy: sending the acknowledgement of barrier 1");
  CHECK(failure.seconds >= 0.010);
}

TEST(proxy_names_the_peer_that_misses_a_barrier) {
  ProxyWorld world(options_of(3), quiet_network(), kBytes);
  world.proxy(0).push_all(CommandKind::kBarrier);
  world.proxy(1).push_all(CommandKind::kBarrier);
  const proxy::Failure& failure = failure_of(world, 0);
  CHECK_EQ(failure.reason, FailureReason::kBarrier);
  CHECK_EQ(failure.peer, 2);
  CHECK_EQ(failure.text, "proxy: barrier 1");
  CHECK(failure.seconds >= 0.010);
  CHECK_THROWS(world.proxy(0).check(), PeerTimeout);
}

TEST(proxy_reports_errors_of_the_provider) {
  for (const bool at_once : {false, true}) {
    loopback::Options network = quiet_network();
    network.write_errors = {{.rank = 0, .thread = 0, .number = 2, .at_once = at_once}};
    ProxyWorld world(options_of(2), network, kBytes);
    world.proxy(0).push(write_to(1, 3000));
    const proxy::Failure& failure = failure_of(world, 0);
    CHECK_EQ(failure.reason, FailureReason::kPeer);
    CHECK_EQ(failure.peer, 1);
    CHECK(failure.messages > 0);
    CHECK(failure.text.find("write 2") != std::string::npos);
    CHECK_THROWS(world.proxy(0).check(), TransportError);
  }
}

TEST(proxy_reports_a_ring_that_stays_full) {
  proxy::ProxyOptions options = options_of(2);
  options.ring_slots = 2;
  ProxyWorld world(options, quiet_network(), kBytes);
  for (int i = 0; i < 2; ++i) world.proxy(0).push(write_to(1));
  CHECK_THROWS(world.proxy(0).push(write_to(1)), RingFull);
  steps(world, 100);
  world.proxy(0).push(write_to(1));
  // A producer that waits for room learns of the failure, not of the full ring.
  world.network().kill(1);
  world.proxy(0).push(write_to(1));
  failure_of(world, 0);
  CHECK_THROWS(world.proxy(0).push(write_to(1)), TransportError);
}

TEST(proxy_reports_commands_that_producers_gave_up) {
  ProxyWorld world(options_of(2), quiet_network(), kBytes);
  steps(world, 10);
  const RingView& ring = world.proxy(0).ring_of(1).view();
  fetch_add_relaxed_system(&ring.faults->abandoned, uint64_t{3});
  const proxy::Failure& failure = failure_of(world, 0);
  CHECK_EQ(failure.reason, FailureReason::kCommand);
  CHECK_EQ(failure.peer, -1);
  CHECK(failure.text.starts_with("producers gave up 3 commands"));
}

TEST(proxy_refuses_commands_that_it_cannot_execute) {
  const CommandFields fine = write_to(1);
  const auto with = [&](auto change) {
    CommandFields fields = fine;
    change(fields);
    return fields;
  };
  const std::vector<std::pair<CommandFields, std::string>> bad = {
      {with([](CommandFields& f) { f.peer = 0; }), "peer"},
      {with([](CommandFields& f) { f.peer = 2; }), "peer"},
      {with([](CommandFields& f) { f.counter = kBarrierCounter; }), "counter"},
      {with([](CommandFields& f) { f.source = kBytes; }), "source"},
      {with([](CommandFields& f) { f.source = kBytes - 96; }), "source"},
      {with([](CommandFields& f) { f.target = kBytes - 96; }), "target"},
      {with([](CommandFields& f) { f.bytes = kBytes + 1; }), "source"},
      {{.kind = CommandKind::kSignal, .peer = 1, .counter = 0, .amount = 0}, "amount"},
  };
  for (const auto& [fields, name] : bad) {
    ProxyWorld world(options_of(2), quiet_network(), kBytes);
    try {
      world.proxy(0).push(fields);
      CHECK(false);
    } catch (const BadArgument& error) {
      CHECK_EQ(error.argument, name);
    }
    // From a producer that does not ask, such as a GPU.
    Producer(world.proxy(0).thread(0).command_ring()).try_push(make_command(fields));
    const proxy::Failure& failure = failure_of(world, 0);
    CHECK_EQ(failure.reason, FailureReason::kCommand);
    CHECK(failure.text.starts_with("a command's " + name + " is "));
  }
  CHECK_EQ(bad.size(), 8u);
}

namespace {

uint32_t data_from(int32_t source, uint32_t sequence, uint32_t parts = 1) {
  return ImmediateLayout::of(5).encode({ImmediateKind::kData, source, 0, sequence, parts}).word;
}

}  // namespace

TEST(proxy_reports_immediates_that_no_peer_sends) {
  const std::vector<std::pair<uint32_t, int32_t>> bad = {
      {3, -1},                          // kind
      {data_from(0, 0) | 7u << 2, -1},  // source 7 of 5
      {data_from(1, 0), -1},            // this rank itself
      {data_from(0, 0), 2},             // rank 2 says that it is rank 0
      {data_from(0, 128), -1},          // more than 64 in flight
      {0u, -1},                         // no parts
  };
  for (const auto& [word, peer] : bad) {
    ScriptedRank rank;
    rank.arrive(word, peer);
    rank.step();
    const proxy::Failure* failure = rank.proxy->failure();
    CHECK(failure != nullptr);
    CHECK_EQ(failure->reason, FailureReason::kImmediate);
    CHECK_THROWS(rank.proxy->check(), TransportError);
    for (size_t i = 0; i < 5 * kCounters; ++i) CHECK_EQ(rank.counters[i], 0u);
  }
  ScriptedRank rank;
  rank.arrive(data_from(0, 0), 0);
  rank.step();
  CHECK(rank.proxy->failure() == nullptr);
  CHECK_EQ(rank.proxy->arrived(0, 0), 1u);
  CHECK_EQ(rank.counters.back(), 77u);
}

// Random immediates count within the table or end the proxy; sanitizers see any other access.
TEST(proxy_survives_random_immediates) {
  Random random(11);
  int ended = 0;
  for (int round = 0; round < 500 / kRoundsShare; ++round) {
    ScriptedRank rank;
    for (int i = 0; i < 50; ++i) rank.arrive(static_cast<uint32_t>(random.next()));
    rank.step();
    ended += rank.proxy->failure() != nullptr ? 1 : 0;
    CHECK_EQ(rank.counters.back(), 77u);
  }
  CHECK(ended > 0);
}

TEST(proxy_reports_completions_of_nothing) {
  for (const uint64_t context : {uint64_t{0}, uint64_t{1} << 32, uint64_t{1} << 33,
                                 uint64_t{4} << 33, uint64_t{7} << 33, ~uint64_t{0}}) {
    ScriptedRank rank;
    rank.transport->next.push_back({.kind = transport::EventKind::kCompletion,
                                    .rail = 0,
                                    .peer = -1,
                                    .immediate = 0,
                                    .context = context});
    rank.step();
    CHECK(rank.proxy->failure() != nullptr);
    CHECK_EQ(rank.proxy->failure()->reason, FailureReason::kTransport);
  }
}

TEST(proxy_times_out_where_the_transport_never_has_room) {
  ScriptedRank rank;
  rank.transport->written = transport::Code::kAgain;
  rank.proxy->push(write_to(2));
  for (int i = 0; i < 20; ++i) rank.step(1ms);
  const proxy::Failure* failure = rank.proxy->failure();
  CHECK(failure != nullptr);
  CHECK_EQ(failure->reason, FailureReason::kTimeout);
  CHECK_EQ(failure->peer, 2);
  CHECK_EQ(failure->messages, 1);
  CHECK_EQ(failure->text, "proxy: room in the transport scripted");
  CHECK(rank.proxy->stats().retries > 0);
}

// A process that was stopped for an hour has not waited for an hour.
// A command of two messages waits 7 us for room; the transport takes 20 and 50 us for them.
TEST(proxy_counts_how_long_messages_wait_and_are_on_their_way) {
  ScriptedRank rank(1s);
  const auto complete = [&](size_t message) {
    rank.transport->next.push_back({.kind = transport::EventKind::kCompletion,
                                    .rail = 0,
                                    .peer = 2,
                                    .immediate = 0,
                                    .context = rank.transport->writes[message].context});
  };
  rank.step();
  rank.step(5us);
  rank.transport->written = transport::Code::kAgain;
  rank.proxy->push({.kind = CommandKind::kWrite, .peer = 2, .bytes = 2048});
  rank.step(3us);
  rank.transport->written = transport::Code::kOk;
  rank.transport->writes.clear();
  rank.step(7us);
  CHECK_EQ(rank.transport->writes.size(), 2u);
  complete(1);
  rank.step(20us);
  complete(0);
  rank.step(30us);
  const proxy::Stats stats = rank.proxy->thread(0).stats_of(2);
  CHECK_EQ(stats.messages, 2u);
  CHECK_EQ(stats.queue_ns, 14'000u);
  CHECK_EQ(rank.proxy->thread(0).stats().ring_ns, 3'000u);
  CHECK_EQ(stats.transit_ns, 70'000u);
}

TEST(proxy_counts_a_suspension_only_up_to_a_second) {
  ScriptedRank rank(5s);
  rank.proxy->push(write_to(2));
  rank.step();
  for (int i = 0; i < 4; ++i) rank.step(1h);
  CHECK(rank.proxy->failure() == nullptr);
  for (int i = 0; i < 3; ++i) rank.step(1h);
  CHECK(rank.proxy->failure() != nullptr);
}

// The timeout of a message begins with the message, not with the last one.
TEST(proxy_counts_no_idle_time_towards_the_timeout) {
  ScriptedRank rank;
  for (int i = 0; i < 30; ++i) rank.step(1ms);
  rank.proxy->push(write_to(2));
  for (int i = 0; i < 9; ++i) rank.step(1ms);
  CHECK(rank.proxy->failure() == nullptr);
  for (int i = 0; i < 3; ++i) rank.step(1ms);
  CHECK(rank.proxy->failure() != nullptr);
}

TEST(proxy_reports_a_transport_that_fails_in_its_poll) {
  ScriptedRank rank;
  rank.transport->words = "the device is gone";
  rank.step();
  const TransportReport report = transport_error([&] { rank.proxy->check(); });
  CHECK_EQ(report.what, "the device is gone");
  CHECK_EQ(report.peer, -1);
}

TEST(proxy_reports_memory_that_cannot_be_registered) {
  const TransportReport report = transport_error([] {
    ScriptedRank rank(10ms, [](Scripted& transport) {
      transport.fails_registration = true;
      transport.words = "no pinned memory is left";
    });
  });
  CHECK_EQ(report.what, "cannot register 65536 bytes of memory: no pinned memory is left");
}

// An exception in the proxy's thread ends neither the process nor the waits for it.
TEST(proxy_reports_an_exception_in_its_thread) {
  ScriptedRank rank(30s, [](Scripted& transport) { transport.throws = true; });
  rank.proxy->start();
  CHECK(poll_until([&] { return rank.proxy->failure() != nullptr; },
                   {.timeout = 30s, .spin = 0ns, .idle = 1ms}));
  CHECK_EQ(rank.proxy->failure()->reason, FailureReason::kProxy);
  CHECK_EQ(rank.proxy->failure()->text, "the proxy's thread has ended: out of order");
  CHECK_THROWS(rank.proxy->push(write_to(2)), TransportError);
}

TEST(proxy_checks_its_settings) {
  const auto refused = [](const std::function<void(proxy::ProxyOptions&)>& change) {
    proxy::ProxyOptions options = options_of(3);
    change(options);
    CHECK_THROWS(proxy::check_options(options), BadArgument);
  };
  proxy::check_options(options_of(3));
  refused([](proxy::ProxyOptions& o) { o.ranks = 0; });
  refused([](proxy::ProxyOptions& o) { o.ranks = 4097; });
  refused([](proxy::ProxyOptions& o) { o.rank = 3; });
  refused([](proxy::ProxyOptions& o) { o.threads = 0; });
  refused([](proxy::ProxyOptions& o) { o.threads = 65; });
  refused([](proxy::ProxyOptions& o) { o.part_bytes = 8; });
  refused([](proxy::ProxyOptions& o) { o.part_bytes = 100; });
  refused([](proxy::ProxyOptions& o) { o.message_bytes = 255; });
  refused([](proxy::ProxyOptions& o) { o.credit.messages = 129; });
  refused([](proxy::ProxyOptions& o) { o.credit.bytes = 255; });
  refused([](proxy::ProxyOptions& o) { o.timeout = 0ns; });
  refused([](proxy::ProxyOptions& o) { o.idle_sleep = 2ms; });
  refused([](proxy::ProxyOptions& o) { o.idle_sleep = -1ns; });
}

TEST(proxies_with_different_settings_do_not_connect) {
  const auto refused = [](const std::function<void(proxy::ProxyAddress&)>& change) {
    ProxyWorld world(options_of(2), quiet_network(), kBytes);
    proxy::ProxyOptions options = options_of(2);
    std::vector<std::byte> memory(1024);
    std::vector<uint64_t> counters(2 * kCounters);
    std::vector<std::unique_ptr<transport::Transport>> transports;
    transports.push_back(std::make_unique<Scripted>());
    proxy::Proxy proxy(options, {.data = memory.data(), .bytes = 1024, .counters = counters},
                       std::move(transports));
    std::vector<proxy::ProxyAddress> ranks{proxy.address(), proxy.address()};
    change(ranks[1]);
    CHECK_THROWS(proxy.connect(ranks), BadArgument);
    CHECK_THROWS(proxy.start(), Misuse);
  };
  refused([](proxy::ProxyAddress& a) { a.ranks = 3; });
  refused([](proxy::ProxyAddress& a) { a.part_bytes = 512; });
  refused([](proxy::ProxyAddress& a) { a.threads.emplace_back(); });
  refused([](proxy::ProxyAddress& a) { a.first_sequence = 1; });
  refused([](proxy::ProxyAddress& a) { a.credit.messages = 0; });
  refused([](proxy::ProxyAddress& a) { a.credit.bytes = 255; });
}
