// A rank that waits for a peer finds out that the peer has ended, though it sends nothing.
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "layout/immediate.h"
#include "links.hpp"
#include "proxy/proxy.h"
#include "proxy_world.hpp"
#include "ranks.hpp"
#include "ring/command.h"
#include "ring/ring.h"
#include "scripted_transport.hpp"

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

// A rank whose transport tells who has ended, if it `tells`.
ScriptedRank rank_that_asks(bool tells) {
  return ScriptedRank(1s, [&](Scripted& transport) { transport.tells_who_has_ended = tells; });
}

void end(ScriptedRank& rank, int32_t peer) {
  rank.transport->words = "the peer has ended";
  rank.transport->next.push_back({.kind = transport::EventKind::kPeerEnded,
                                  .rail = -1,
                                  .peer = peer,
                                  .immediate = 0,
                                  .context = 0});
}

}  // namespace

TEST(proxy_asks_a_network_that_tells_who_has_ended) {
  ScriptedRank rank = rank_that_asks(true);
  proxy::ProxyThread& thread = rank.proxy->thread(0);
  rank.proxy->probe(2);
  rank.step();
  rank.step();
  CHECK(rank.transport->probes == std::vector<int32_t>{2});
  CHECK(rank.transport->writes.empty());
  end(rank, 2);
  rank.step();
  CHECK(thread.lost(2) != nullptr);
  CHECK_EQ(thread.lost(2)->reason, proxy::FailureReason::kEnded);
  CHECK(thread.lost(3) == nullptr);
  CHECK(thread.failure() == nullptr);
  rank.proxy->probe(2);  // not again
  rank.step();
  CHECK_EQ(rank.transport->probes.size(), 1u);
}

// A kernel that waits for long asks again and again, and the network is asked once in a while.
TEST(proxy_asks_for_peers_for_which_kernels_wait) {
  ScriptedRank rank = rank_that_asks(true);
  const RingView ring = rank.proxy->thread(0).kernel_ring()->view();
  const auto ask = [&](std::chrono::nanoseconds passed) {
    for (const int32_t peer : {2, 4}) ring.questions()->peers[peer] = 1;
    rank.step(passed);
  };
  ask(0s);
  for (int millisecond = 0; millisecond < 50; ++millisecond) ask(1ms);
  CHECK(rank.transport->probes == (std::vector<int32_t>{2, 4}));
  for (int millisecond = 0; millisecond < 50; ++millisecond) ask(1ms);
  CHECK(rank.transport->probes == (std::vector<int32_t>{2, 4, 2, 4}));
  CHECK_EQ(ring.losses()->peers[0], 0u);
  end(rank, 4);
  rank.step();
  CHECK_EQ(ring.losses()->peers[0], uint64_t{1} << 4);
  for (int millisecond = 0; millisecond < 100; ++millisecond) rank.step(1ms);
  ring.questions()->peers[2] = 0;
  const size_t before = rank.transport->probes.size();
  for (int millisecond = 0; millisecond < 100; ++millisecond) rank.step(1ms);
  CHECK_EQ(rank.transport->probes.size(), before);
}

TEST(proxy_writes_to_a_peer_where_only_a_write_tells) {
  ScriptedRank rank = rank_that_asks(false);
  proxy::ProxyThread& thread = rank.proxy->thread(0);
  rank.proxy->probe(3);
  rank.step();
  CHECK_EQ(rank.transport->writes.size(), 1u);
  CHECK_EQ(rank.transport->writes[0].peer, 3);
  CHECK_EQ(rank.transport->writes[0].bytes, 0);
  CHECK(rank.transport->writes[0].reported);
  CHECK(thread.outstanding());
  rank.proxy->probe(3);  // the first is on its way, which tells as much
  rank.step();
  CHECK_EQ(rank.transport->writes.size(), 1u);
  // What a lost peer never completes does not keep the thread busy.
  end(rank, 3);
  rank.step();
  CHECK(thread.lost(3) != nullptr);
  CHECK(!thread.outstanding());
}

// Its last messages stay unacknowledged: the transport completes no acknowledgement to a dead peer.
TEST(proxy_comes_to_rest_where_a_peer_ends_with_messages_to_acknowledge) {
  ScriptedRank rank = rank_that_asks(true);
  proxy::ProxyThread& thread = rank.proxy->thread(0);
  const ImmediateLayout layout = ImmediateLayout::of(5);
  for (uint32_t sequence = 0; sequence < 2; ++sequence) {
    const EncodedImmediate encoded = layout.encode({.kind = ImmediateKind::kSignal,
                                                    .source = 2,
                                                    .counter = 0,
                                                    .sequence = sequence,
                                                    .amount = 1});
    rank.arrive(encoded.word);
    for (int i = 0; i < 3; ++i) rank.step();
  }
  CHECK_EQ(rank.transport->writes.size(), 1u);
  CHECK(thread.outstanding());
  end(rank, 2);
  for (int i = 0; i < 3; ++i) rank.step();
  CHECK(thread.lost(2) != nullptr);
  CHECK(!thread.outstanding());
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
  ScriptedRank rank = rank_that_asks(true);
  proxy::ProxyThread& thread = rank.proxy->thread(0);
  Producer producer(thread.command_ring());
  static_cast<void>(producer.push(
      make_command({.kind = CommandKind::kWrite, .peer = 2, .counter = 0, .bytes = 64}), 1s));
  rank.step();
  CHECK_EQ(rank.transport->writes.size(), 1u);
  end(rank, 2);
  rank.step();
  CHECK(thread.lost(2) != nullptr);
  CHECK_EQ(thread.lost(2)->reason, proxy::FailureReason::kEnded);
  CHECK_EQ(thread.lost(2)->messages, 1);
  CHECK(thread.failure() == nullptr);
  CHECK(!thread.outstanding());
  try {
    proxy::raise(*thread.lost(2));
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

// A rank that waits for a barrier asks for its peers until it sees that the barrier has ended. They
// may have closed their transports by then: whoever writes to one of them may write to memory that
// is gone.
TEST(proxy_asks_nobody_behind_a_barrier) {
  proxy::ProxyOptions options = options_of(2);
  options.kernel_ring_slots = 8;
  ProxyWorld world(options, quiet_network(), kBytes);
  std::vector<proxy::Tickets> barriers;
  barriers.reserve(2);
  for (int32_t rank = 0; rank < 2; ++rank) {
    barriers.push_back(world.proxy(rank).push_all(CommandKind::kBarrier));
  }
  steps(world, 100);
  for (int32_t rank = 0; rank < 2; ++rank) {
    CHECK(world.proxy(rank).passed(barriers[static_cast<size_t>(rank)]));
  }
  const uint64_t sent = world.proxy(0).stats().acks_sent;
  const auto asked_by_rank = [&] {
    world.proxy(0).probe(1);
    steps(world, 100);
    return world.proxy(0).stats().acks_sent - sent;
  };
  const auto asked_by_kernel = [&] {
    auto* questions = world.proxy(0).thread(0).kernel_ring()->view().questions();
    questions->peers[1] = 1;
    world.network().advance(1'000'000'000);  // it is answered once a second
    steps(world, 100);
    CHECK_EQ(questions->peers[1], 0u);
    return world.proxy(0).stats().acks_sent - sent;
  };
  CHECK_EQ(asked_by_rank(), 0u);
  CHECK_EQ(asked_by_kernel(), 0u);
  world.proxy(0).push_all(CommandKind::kFence);  // which is for no peer
  steps(world, 100);
  CHECK_EQ(asked_by_rank(), 0u);
  CHECK_EQ(asked_by_kernel(), 0u);
  world.proxy(0).push({.kind = CommandKind::kWrite, .peer = 1, .counter = 0, .bytes = 64});
  steps(world, 100);
  CHECK_EQ(asked_by_rank(), 1u);
  CHECK_EQ(asked_by_kernel(), 2u);
}

namespace {

// Counts for which peers a wait asks.
class Asked final : public Carrier {
 public:
  Link& link(int32_t) override { return link_; }
  std::vector<RingView> kernel_rings() const override { return {}; }
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
  CHECK(!wait_for_signal(*group[0], Phase::kBarrier, 2, 0, 1));
  CHECK(group[0]->masked(2));
  CHECK(asked.peers == std::vector<int32_t>{2});
  group[0]->close();
}
