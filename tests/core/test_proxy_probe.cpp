// A rank that waits for a peer finds out that the peer has ended, though it sends nothing.
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <utility>

#include "check.hpp"
#include "layout/immediate.h"
#include "links.hpp"
#include "proxy/proxy.h"
#include "proxy_world.hpp"
#include "ranks.hpp"
#include "ring/command.h"
#include "ring/ring.h"
#include "stub_transport.hpp"

using namespace fanfold;
using namespace std::chrono_literals;

namespace {

constexpr int64_t kBytes = 4096;

proxy::ProxyOptions options_of(int32_t ranks) {
  proxy::ProxyOptions options;
  options.ranks = ranks;
  options.threads = 1;
  return options;
}

// A transport that asks the network itself, if it `asks`.
class Probed final : public StubTransport {
 public:
  explicit Probed(bool asks) : asks_(asks) {}

  bool probe(int32_t peer) override {
    probes.push_back(peer);
    return asks_;
  }
  int32_t poll(std::span<transport::Event> room) override {
    if (arriving >= 0) {
      room[0] = {.kind = transport::EventKind::kArrival,
                 .rail = 0,
                 .peer = -1,
                 .immediate = static_cast<uint32_t>(std::exchange(arriving, -1)),
                 .context = 0};
      return 1;
    }
    if (dead < 0) return 0;
    error_ = "the peer has ended";
    room[0] = {.kind = transport::EventKind::kPeerEnded,
               .rail = -1,
               .peer = std::exchange(dead, -1),
               .immediate = 0,
               .context = 0};
    return 1;
  }

  std::vector<int32_t> probes;
  int32_t dead = -1;      // the next poll reports it
  int64_t arriving = -1;  // an immediate, which the next poll reports

 private:
  bool asks_;
};

// Rank 0 of three, whose peers are not there.
struct Alone {
  explicit Alone(bool asks) {
    const proxy::ProxyOptions options = options_of(3);
    const proxy::ProxyMemory rank{.data = memory.data(),
                                  .bytes = kBytes,
                                  .sources = {},
                                  .store = nullptr,
                                  .counters = counters,
                                  .bell = nullptr};
    auto owned = std::make_unique<Probed>(asks);
    transport = owned.get();
    thread = std::make_unique<proxy::ProxyThread>(options, 0, rank, std::move(owned));
    const proxy::ThreadAddress address{
        .address = {}, .memory = {.base = 0, .key = 0, .bytes = kBytes}, .inbox = {}};
    for (const int32_t peer : {1, 2}) thread->connect(peer, address, options.credit);
  }
  void step() { static_cast<void>(thread->step(now += 1ms)); }

  std::vector<std::byte> memory = std::vector<std::byte>(kBytes);
  std::vector<uint64_t> counters = std::vector<uint64_t>(size_t{3} * kCounters);
  proxy::ProxyThread::Time now;
  Probed* transport = nullptr;
  std::unique_ptr<proxy::ProxyThread> thread;
};

}  // namespace

TEST(proxy_asks_a_network_that_tells_who_has_ended) {
  Alone rank(true);
  rank.thread->probe(2);
  rank.step();
  rank.step();
  CHECK(rank.transport->probes == std::vector<int32_t>{2});
  CHECK(rank.transport->writes.empty());
  rank.transport->dead = 2;
  rank.step();
  CHECK_EQ(rank.thread->lost(2)->reason, proxy::FailureReason::kEnded);
  CHECK(rank.thread->lost(1) == nullptr);
  CHECK(rank.thread->failure() == nullptr);
  rank.thread->probe(2);  // not again
  rank.step();
  CHECK_EQ(rank.transport->probes.size(), 1u);
}

TEST(proxy_writes_to_a_peer_where_only_a_write_tells) {
  Alone rank(false);
  rank.thread->probe(1);
  rank.step();
  CHECK_EQ(rank.transport->writes.size(), 1u);
  CHECK_EQ(rank.transport->writes[0].peer, 1);
  CHECK_EQ(rank.transport->writes[0].bytes, 0);
  CHECK(rank.transport->writes[0].reported);
  CHECK(rank.thread->outstanding());
  rank.thread->probe(1);  // the first is on its way, which tells as much
  rank.step();
  CHECK_EQ(rank.transport->writes.size(), 1u);
  // What a lost peer never completes does not keep the thread busy.
  rank.transport->dead = 1;
  rank.step();
  CHECK(rank.thread->lost(1) != nullptr);
  CHECK(!rank.thread->outstanding());
}

// Its last messages stay unacknowledged: the transport completes no acknowledgement to a dead peer.
TEST(proxy_comes_to_rest_where_a_peer_ends_with_messages_to_acknowledge) {
  Alone rank(true);
  const ImmediateLayout layout = ImmediateLayout::of(3);
  for (uint32_t sequence = 0; sequence < 2; ++sequence) {
    const EncodedImmediate encoded = layout.encode({.kind = ImmediateKind::kSignal,
                                                    .source = 2,
                                                    .counter = 0,
                                                    .sequence = sequence,
                                                    .amount = 1});
    rank.transport->arriving = encoded.word;
    for (int i = 0; i < 3; ++i) rank.step();
  }
  CHECK_EQ(rank.transport->writes.size(), 1u);
  CHECK(rank.thread->outstanding());
  rank.transport->dead = 2;
  for (int i = 0; i < 3; ++i) rank.step();
  CHECK(rank.thread->lost(2) != nullptr);
  CHECK(!rank.thread->outstanding());
}

// A late peer that is given up may go on sending, and its messages are acknowledged.
TEST(proxy_comes_to_rest_with_a_given_up_peer_that_still_sends) {
  proxy::ProxyOptions options = options_of(2);
  options.give_up_peers = true;
  options.timeout = 10ms;  // of the network's time
  ProxyWorld world(options, quiet_network(), kBytes);
  world.network().cut(0, 1, 50'000'000);
  world.proxy(0).push({.kind = CommandKind::kWrite, .peer = 1, .counter = 0, .bytes = 64});
  for (int i = 0; i < 100'000 && !world.proxy(0).lost(1); ++i) world.step_all();
  CHECK(world.proxy(0).lost(1));
  world.proxy(1).push({.kind = CommandKind::kWrite, .peer = 0, .counter = 0, .bytes = 64});
  for (int i = 0; i < 100'000 && world.proxy(1).stats().acks_received == 0; ++i) world.step_all();
  steps(world, 200);
  CHECK_EQ(world.proxy(0).arrived(1, 0), 1u);
  CHECK(!world.proxy(0).thread(0).outstanding());
}

// The proxy may not give up peers that are late, but there is nothing to wait for.
TEST(proxy_gives_up_a_peer_that_has_ended) {
  Alone rank(true);
  Producer producer(rank.thread->command_ring());
  static_cast<void>(producer.push(
      make_command({.kind = CommandKind::kWrite, .peer = 2, .counter = 0, .bytes = 64}), 1s));
  rank.step();
  CHECK_EQ(rank.transport->writes.size(), 1u);
  rank.transport->dead = 2;
  rank.step();
  CHECK_EQ(rank.thread->lost(2)->reason, proxy::FailureReason::kEnded);
  CHECK_EQ(rank.thread->lost(2)->messages, 1);
  CHECK(rank.thread->failure() == nullptr);
  CHECK(!rank.thread->outstanding());
  try {
    proxy::raise(*rank.thread->lost(2));
  } catch (const PeerTimeout& error) {
    CHECK_EQ(error.report.peer, 2);
    CHECK(error.report.peer_gone);
  }
}

TEST(proxy_goes_on_with_a_peer_that_it_has_asked) {
  ProxyWorld world(options_of(2), quiet_network(), kBytes);
  for (int round = 1; round <= 3; ++round) {
    world.proxy(0).probe(1);
    steps(world, 100);
    CHECK_EQ(world.proxy(1).stats().acks_received, static_cast<uint64_t>(round));
    CHECK(!world.proxy(0).thread(0).outstanding());
  }
  world.proxy(1).push({.kind = CommandKind::kWrite, .peer = 0, .counter = 0, .bytes = 64});
  steps(world, 200);
  CHECK_EQ(world.proxy(0).arrived(1, 0), 1u);
  CHECK(world.proxy(0).failure() == nullptr);
  CHECK(world.proxy(1).failure() == nullptr);
}

namespace {

// Counts for which peers a wait asks.
class Asked final : public Carrier {
 public:
  Link& link(int32_t) override { return link_; }
  void begin_wait() override {}
  void end_wait() override {}
  void check(int32_t) const override {}
  bool lost(int32_t) const override { return false; }
  bool ended(int32_t) const override { return asked_; }
  void probe(int32_t peer) override {
    peers.push_back(peer);
    asked_ = true;
  }
  std::vector<CarrierCount> counts() const override { return {}; }
  std::string path(int32_t) const override { return {}; }
  void finish(bool) noexcept override {}

  std::vector<int32_t> peers;

 private:
  class None final : public Link {
   public:
    void put(int64_t, int64_t) override {}
    void store(int64_t, uint64_t) override {}
    void fence() override {}
  };
  None link_;
  bool asked_ = false;
};

}  // namespace

// The time of the wait would be over after half a minute.
TEST(memory_asks_whether_a_late_peer_on_another_host_still_runs) {
  SymmetricOptions options = options_for(3, kBytes);
  options.hosts = {0, 0, 1};
  options.mask_late_peers = true;
  const Group group = SymmetricMemory::in_process(options);
  auto owned = std::make_unique<Asked>();
  const Asked& asked = *owned;
  group[0]->carry(std::move(owned));
  const auto start = std::chrono::steady_clock::now();
  CHECK(!wait_for_signal(*group[0], Phase::kBarrier, 2, 0, 1));
  CHECK(group[0]->masked(2));
  CHECK(asked.peers == std::vector<int32_t>{2});
  CHECK(std::chrono::steady_clock::now() - start < 15s);
  group[0]->close();
}
