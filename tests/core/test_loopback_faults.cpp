// The loopback network: links that drop packets, lost peers, errors, and bounds.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.hpp"
#include "loopback_world.hpp"
#include "transport/loopback.h"
#include "transport/loopback_link.h"

using namespace fanfold;
using namespace fanfold::transport;
using namespace fanfold::transport::loopback;
using contract::index;

// --- Links ------------------------------------------------------------------------------------

namespace {

// 10 GB/s without headers, so that a packet of 1000 bytes takes 100 ns.
Options narrow_links(int64_t buffer_bytes) {
  Options options;
  options.link = {.bytes_per_us = 10'000,
                  .buffer_bytes = buffer_bytes,
                  .packet_bytes = 1'000,
                  .header_bytes = 0,
                  .retransmit_ns = 50'000};
  return options;
}

// Sends `bytes` from each of `senders` ranks to rank 0 in writes of `chunk` bytes, with at most
// `window` writes of each sender that rank 0 has not received. Returns bytes per microsecond.
struct Incast {
  int32_t senders;
  int64_t bytes;
  int64_t chunk;
  int64_t window;
};

int64_t goodput(const Options& options, const Incast& incast) {
  Small small(options, incast.senders + 1, (incast.senders + 1) * (incast.bytes + 9'000));
  const int64_t each = incast.bytes / incast.chunk;
  std::vector<int64_t> sent(index(incast.senders + 1));
  std::vector<int64_t> received(index(incast.senders + 1));
  int64_t all = incast.senders * each;
  while (all > 0) {
    for (int32_t rank = 1; rank <= incast.senders; ++rank) {
      int64_t& count = sent[index(rank)];
      while (count < each && count - received[index(rank)] < incast.window &&
             small.world.post(rank, 0, 0, incast.chunk)) {
        ++count;
      }
    }
    CHECK(small.network->until_next() >= 0);
    small.network->advance(small.network->until_next());
    for (const Event& event : small.poll(0)) {
      ++received[index(small.world.posted[event.immediate].from)];
      --all;
    }
    for (int32_t rank = 1; rank <= incast.senders; ++rank) small.poll(rank);
  }
  return incast.senders * each * incast.chunk * 1000 / small.network->now();
}

}  // namespace

TEST(loopback_a_link_takes_the_time_of_its_bytes) {
  Options options = narrow_links(0);
  options.link.header_bytes = 100;
  options.delay = {.least = 500, .most = 500};
  Small small(options);
  CHECK(small.world.post(0, 1, 0, 2'500));  // packets of 1100, 1100 and 600 bytes
  // The first packet has left the source after 110 ns; all take 280 ns on the target's link.
  small.network->advance(500 + 110 + 280 - 1);
  CHECK_EQ(small.arrivals(1), 0);
  small.network->advance(1);
  CHECK_EQ(small.arrivals(1), 1);
  CHECK(small.landed(0));
  CHECK_EQ(small.network->counters().packets, 3);
  CHECK(small.world.post(0, 1, 0, 0));  // an empty write has a header
  small.network->advance(500 + 10 + 10 - 1);
  CHECK_EQ(small.arrivals(1), 0);
  small.network->advance(1);
  CHECK_EQ(small.arrivals(1), 1);
}

TEST(loopback_a_source_sends_one_write_after_the_other) {
  Small small(narrow_links(0), 3);
  CHECK(small.world.post(0, 1, 0, 1'000));
  CHECK(small.world.post(0, 2, 0, 1'000));
  small.network->advance(200);
  CHECK_EQ(small.arrivals(1), 1);
  CHECK_EQ(small.arrivals(2), 0);
  small.network->advance(100);
  CHECK_EQ(small.arrivals(2), 1);
}

TEST(loopback_a_queue_holds_what_fits) {
  transport::loopback::Link link({.bytes_per_us = 10'000, .buffer_bytes = 3'000});
  CHECK(link.enqueue(0, 1'000) == 100);
  CHECK(link.enqueue(0, 2'000) == 300);
  CHECK_EQ(link.queued(0), 3'000);
  CHECK(!link.enqueue(0, 1).has_value());
  CHECK(!link.enqueue(99, 1'000).has_value());
  CHECK(link.enqueue(100, 1'000) == 400);
  CHECK_EQ(link.queued(400), 0);
  CHECK(link.enqueue(1'000, 1'000) == 1'100);
  transport::loopback::Link unlimited({.bytes_per_us = 4, .buffer_bytes = 0});
  CHECK(unlimited.enqueue(0, 1'000'000'000) == 250'000'000'000);
  CHECK_EQ(unlimited.queued(0), 1'000'000'000);
}

// The formula of LinkOptions: n trains of w bytes fill the queue up to (n - 1) * w.
TEST(loopback_incast_drops_nothing_up_to_the_bound) {
  constexpr int32_t kSenders = 8;
  constexpr int64_t kPacket = 1'000;
  constexpr int64_t kTrain = 20 * kPacket;
  constexpr int64_t kQueue = (kSenders - 1) * kTrain;
  for (const int64_t buffer : {kQueue + kSenders * kPacket, kQueue - kPacket}) {
    Small small(narrow_links(buffer), kSenders + 1);
    for (int32_t rank = 1; rank <= kSenders; ++rank) {
      CHECK(small.world.post(rank, 0, 0, kTrain));
    }
    small.network->advance(kSenders * kTrain / 10 + 1'000'000);
    small.world.finish();
    const Counters counters = small.network->counters();
    CHECK(counters.most_queued_bytes >= kQueue - kPacket);
    CHECK(counters.most_queued_bytes <= buffer);
    CHECK_EQ(counters.packets_dropped > 0, buffer < kQueue);
  }
}

// Also if a train is resent while its useless rest is still leaving.
TEST(loopback_only_packets_that_were_lost_are_sent_again) {
  for (const int64_t retransmit_ns : {500, 50'000}) {
    Options options = narrow_links(3'000);
    options.link.retransmit_ns = retransmit_ns;
    Small small(options, 3);
    CHECK(small.world.post(1, 0, 0, 6'000));
    CHECK(small.world.post(2, 0, 0, 20'000));
    small.network->advance(10'000'000);
    small.world.finish();
    const Counters counters = small.network->counters();
    CHECK(counters.packets_dropped > 0);
    CHECK(counters.packets_useless > 0);
    CHECK_EQ(counters.packets, 26 + counters.packets_dropped + counters.packets_useless);
    CHECK_EQ(counters.landed, 2);
  }
}

TEST(loopback_incast_collapses_without_credits) {
  constexpr int32_t kSenders = 8;
  constexpr int64_t kBytes = 160'000;
  Options options = narrow_links(100'000);
  options.link.retransmit_ns = 1'000'000;  // as much as 10 MB
  // The window that keeps (n - 1) * w within the buffer, and one that does not.
  const int64_t with = goodput(options, {kSenders, kBytes, 4'000, 3});
  const int64_t without = goodput(options, {kSenders, kBytes, 4'000, 100});
  const int64_t alone = goodput(options, {1, kBytes, 4'000, 100});
  CHECK(with > 9'000);
  CHECK(alone > 9'000);
  CHECK(without < 2'000);
  // A large chunk is a large train, whatever the window.
  CHECK(goodput(options, {kSenders, kBytes, 40'000, 1}) < 2'000);
}

// --- Failures ---------------------------------------------------------------------------------

namespace {

void expect_failed_peer(Small& small, int32_t rank, int32_t peer, const std::string& error) {
  const std::vector<Event> events = small.poll(rank);
  CHECK_EQ(events.size(), 1u);
  CHECK(events[0].kind == EventKind::kPeerFailed);
  CHECK_EQ(events[0].peer, peer);
  CHECK_EQ(small.transport(rank).error(), error);
  CHECK(small.transport(rank).write(small.write(rank, peer)) == Code::kFailed);
  CHECK_EQ(small.transport(rank).error(), error);
  CHECK_EQ(small.poll(rank).size(), 0u);  // it is reported once
}

}  // namespace

TEST(loopback_a_killed_rank_is_lost_to_its_peers) {
  Options options;
  options.detect_ns = 100;
  options.delay = {.least = 10, .most = 10};
  options.writes = 3;
  Small small(options, 3);
  for (int i = 0; i < 3; ++i) CHECK(small.world.post(0, 1, 0, 8));
  CHECK(!small.world.post(0, 2, 0, 8));
  CHECK(small.world.post(1, 2, 0, 8));
  small.network->kill(1);
  CHECK_EQ(small.poll(1).size(), 0u);
  CHECK_EQ(small.transport(1).error(), "rank 1 was killed");
  CHECK(small.transport(1).write(small.write(1, 0)) == Code::kFailed);
  small.network->advance(99);
  CHECK_EQ(small.poll(0).size(), 0u);
  small.network->advance(1);
  expect_failed_peer(small, 0, 1, "peer 1 is lost: it has died");
  expect_failed_peer(small, 2, 1, "peer 1 is lost: it has died");
  // The writes that were lost are no longer in flight, and other peers are reachable.
  for (int i = 0; i < 3; ++i) CHECK(small.world.post(0, 2, 0, 8));
  small.network->advance(10);
  CHECK_EQ(small.arrivals(2), 3);
}

TEST(loopback_a_transport_that_is_gone_fails_the_writes_to_it) {
  Small small(Options{});
  CHECK(small.world.post(0, 1, 0, 8));
  small.poll(1);
  CHECK_EQ(small.completions(0), 1);
  small.world.transports[1].reset();
  CHECK_EQ(small.poll(0).size(), 0u);  // nobody writes to it
  CHECK(small.world.post(0, 1, 0, 8));
  expect_failed_peer(small, 0, 1, "peer 1 is lost: the peer has gone");
}

TEST(loopback_what_has_arrived_is_lost_with_its_transport) {
  Small small(Options{});
  CHECK(small.world.post(0, 1, 0, 8));
  small.network->advance(10);
  small.world.transports[1].reset();
  expect_failed_peer(small, 0, 1, "peer 1 is lost: the peer has gone");
}

TEST(loopback_a_short_cut_delays_writes) {
  Options options;
  options.retry_ns = 1000;
  Small small(options, 3);
  small.network->cut(1, 0, 1000);
  CHECK(small.world.post(0, 1, 0, 8));
  CHECK(small.world.post(1, 0, 0, 8));
  CHECK(small.world.post(0, 2, 0, 8));
  CHECK_EQ(small.arrivals(2), 1);
  small.network->advance(999);
  CHECK_EQ(small.arrivals(0), 0);
  CHECK_EQ(small.arrivals(1), 0);
  small.network->advance(1);
  CHECK_EQ(small.arrivals(0), 1);
  CHECK_EQ(small.arrivals(1), 1);
  CHECK(small.landed(0));
}

TEST(loopback_a_long_cut_loses_the_peer) {
  for (const int64_t ns : {int64_t{1001}, Network::kForever}) {
    Options options;
    options.retry_ns = 1000;
    Small small(options, 3);
    small.network->cut(0, 1, ns);
    CHECK(small.world.post(0, 1, 0, 8));
    small.network->advance(999);
    CHECK_EQ(small.poll(0).size(), 0u);
    small.network->advance(1);
    expect_failed_peer(small, 0, 1, "peer 1 is lost: no answer for 1000 ns");
    small.network->advance(10'000);
    CHECK_EQ(small.poll(1).size(), 0u);  // which has sent nothing, and notices nothing
  }
}

TEST(loopback_a_cut_without_a_retry_limit_is_silent) {
  Small small(Options{});
  small.network->cut(0, 1, Network::kForever);
  CHECK(small.world.post(0, 1, 0, 8));
  small.network->advance(int64_t{1} << 45);
  CHECK_EQ(small.poll(0).size(), 0u);
  CHECK_EQ(small.poll(1).size(), 0u);
}

TEST(loopback_the_nth_write_meets_an_error) {
  for (const bool at_once : {true, false}) {
    Options options;
    options.write_errors = {{.rank = 0, .thread = 0, .number = 3, .at_once = at_once}};
    Small small(options, 3);
    CHECK(small.world.post(0, 1, 0, 8));
    CHECK(small.world.post(0, 2, 0, 8));
    if (!at_once) {
      CHECK(small.world.post(0, 1, 0, 8));
      expect_failed_peer(small, 0, 1, "write 3 to peer 1 met an error of the provider");
      CHECK(small.world.post(0, 2, 0, 8));
      CHECK_EQ(small.arrivals(2), 2);
      continue;
    }
    for (int repeat = 0; repeat < 2; ++repeat) {  // a failed transport stays failed
      CHECK(small.transport(0).write(small.write(0, 2)) == Code::kFailed);
      CHECK_EQ(small.transport(0).error(), "write 3 met an error of the provider");
      CHECK_EQ(small.poll(0).size(), 0u);
    }
    CHECK(small.world.post(1, 2, 0, 8));
    CHECK_EQ(small.arrivals(2), 2);
  }
}

// --- Bounds -----------------------------------------------------------------------------------

namespace {

template <typename Change>
std::string error_of(Change&& change) {
  Small small(Options{}, 2, 1000);
  Write write = small.write(0, 1);
  change(write);
  CHECK(small.transport(0).write(write) == Code::kFailed);
  std::string error = small.transport(0).error();
  CHECK(small.transport(0).write(small.write(0, 1)) == Code::kFailed);  // it stays failed
  CHECK_EQ(small.transport(0).error(), error);
  return error;
}

void refuses(const std::string& argument, const Options& options) {
  try {
    Network::create(options);
  } catch (const BadArgument& error) {
    CHECK_EQ(error.argument, "loopback " + argument);
    return;
  }
  check::fail(__FILE__, __LINE__, argument + " was accepted");
}

}  // namespace

TEST(loopback_errors_name_values_and_bounds) {
  CHECK_EQ(error_of([](Write& write) { write.peer = 7; }), "peer 7 was never connected");
  CHECK_EQ(error_of([](Write& write) { write.rail = 1; }), "rail is 1, but there are 1 rails");
  CHECK_EQ(error_of([](Write& write) { write.bytes = (int64_t{1} << 30) + 1; }),
           "a write has 1073741825 bytes, but must have between 0 and 1073741824");
  CHECK_EQ(error_of([](Write& write) { write.source.index = 2; }),
           "source memory 2 is none of the 2 that are registered");
  CHECK_EQ(error_of([](Write& write) { write.source_offset = 937; }),
           "source: 64 bytes at offset 937 are not within the 1000 registered bytes");
  CHECK_EQ(error_of([](Write& write) { write.target_offset = 937; }),
           "target: 64 bytes at offset 937 are not within the 1000 registered bytes of peer 1");
  CHECK_EQ(error_of([](Write& write) { write.target.key = 5; }),
           "target: peer 1 has no memory with key 5");
  CHECK(error_of([](Write& write) { ++write.target.base; }).find("is not that of key") !=
        std::string::npos);
  // A range that ends with the memory is within it.
  Small small(Options{}, 2, 1000);
  Write write = small.write(0, 1);
  write.source_offset = write.target_offset = 936;
  CHECK(small.transport(0).write(write) == Code::kOk);
}

TEST(loopback_connects_only_what_it_knows) {
  const NetworkPtr network = Network::create(Options{});
  const NetworkPtr other = Network::create(Options{});
  const auto stranger = other->open(1);
  const auto error_of_connect = [&](int32_t peer, const Address& address) {
    const auto transport = network->open(0);
    CHECK(transport->connect(peer, address) == Code::kFailed);
    return transport->error();
  };
  CHECK_EQ(error_of_connect(1, Address(5)), "the address of peer 1 has 5 bytes instead of 24");
  CHECK_EQ(error_of_connect(1, stranger->address()),
           "the address of peer 1 is none of this network");
  const auto peer = network->open(1);
  CHECK_EQ(error_of_connect(-1, peer->address()), "peer is -1, but must be at least 0");
  const auto transport = network->open(0);
  CHECK(transport->connect(1, peer->address()) == Code::kOk);
  CHECK(transport->connect(1, peer->address()) == Code::kFailed);
  CHECK_EQ(transport->error(), "peer 1 is connected already");
}

TEST(loopback_each_thread_of_a_rank_has_its_transport) {
  const NetworkPtr network = Network::create(Options{});
  const auto first = network->open(0, 0);
  const auto second = network->open(0, 1);
  const auto peer = network->open(1, 3);
  CHECK_THROWS(network->open(0, 1), BadArgument);
  CHECK_THROWS(network->open(-1), BadArgument);
  CHECK_THROWS(network->open(0, -1), BadArgument);
  CHECK(second->connect(1, peer->address()) == Code::kOk);
  CHECK(peer->connect(0, second->address()) == Code::kOk);
  Write write{};
  write.peer = 1;
  write.immediate = 77;
  CHECK(second->write(write) == Code::kOk);
  std::vector<Event> events(4);
  CHECK_EQ(first->poll(events), 0);
  CHECK_EQ(peer->poll(events), 1);
  CHECK_EQ(events[0].immediate, 77u);
  CHECK_EQ(second->poll(events), 1);
  CHECK(first->write(write) == Code::kFailed);  // this thread has connected nothing
}

TEST(loopback_options_have_bounds) {
  const auto with = [](auto&& change) {
    Options options;
    change(options);
    return options;
  };
  refuses("rails", with([](Options& options) { options.rails = 0; }));
  refuses("writes", with([](Options& options) { options.writes = 0; }));
  refuses("write_bytes", with([](Options& options) { options.write_bytes = (1 << 30) + 1; }));
  refuses("poll_ns", with([](Options& options) { options.poll_ns = -1; }));
  refuses("again_one_in", with([](Options& options) { options.again_one_in = 1; }));
  refuses("piece_bytes", with([](Options& options) { options.piece_bytes = -1; }));
  refuses("receive_queue", with([](Options& options) { options.receive_queue = -1; }));
  refuses("delay.most", with([](Options& options) { options.delay.least = 5; }));
  refuses("stall.rare", with([](Options& options) { options.stall.rare = -1; }));
  refuses("link.packet_bytes", with([](Options& options) { options.link.packet_bytes = 0; }));
  refuses("link.buffer_bytes", with([](Options& options) { options.link.buffer_bytes = 4000; }));
  refuses("write_errors.number",
          with([](Options& options) { options.write_errors = {{.number = 0}}; }));
}
