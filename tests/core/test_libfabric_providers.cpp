// The duties of providers whose hardware this machine lacks, over a libfabric that plays them.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.hpp"
#include "fake_libfabric.hpp"
#include "transport/libfabric.h"

using namespace fanfold;
using namespace fanfold::transport;
using libfabric::Fake;
using libfabric::FakeBehaviour;

namespace {

constexpr int64_t kBytes = 4096;
constexpr int kVerbs =
    libfabric::kMrLocal | libfabric::kMrVirtAddr | libfabric::kMrAllocated | libfabric::kMrProvKey;

// A socket of this host on a port of its own.
struct Listener {
  Listener() : descriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof address;
    auto* name = reinterpret_cast<sockaddr*>(&address);
    CHECK(bind(descriptor, name, bytes) == 0 && listen(descriptor, 8) == 0);
    CHECK_EQ(getsockname(descriptor, name, &bytes), 0);
    port = ntohs(address.sin_port);
  }
  ~Listener() { close(); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  void close() {
    if (descriptor >= 0) ::close(descriptor);
    descriptor = -1;
  }

  int descriptor;
  uint16_t port = 0;
};

// Two transports over the fake, each with memory.
struct World {
  explicit World(const FakeBehaviour& behaviour, int32_t endpoints = 1, int32_t nics = 1) {
    const libfabric::Library& library = libfabric::fake_library(behaviour);
    const LibfabricOptions options{.request = {.provider = behaviour.provider, .nics_wanted = nics},
                                   .endpoints_per_nic = endpoints};
    for (size_t i = 0; i < 2; ++i) {
      memory[i].assign(static_cast<size_t>(kBytes), static_cast<std::byte>(i + 1));
      transports[i] = open_libfabric(library, options);
    }
    for (size_t i = 0; i < 2; ++i) {
      CHECK_EQ(transports[i]->connect(peer_of(i), transports[1 - i]->address()), Code::kOk);
      local[i] = transports[i]->register_memory(memory[i].data(), kBytes);
    }
  }

  static int32_t peer_of(size_t rank) { return rank == 0 ? 1 : 0; }

  Write write(int32_t rail, int64_t bytes, uint32_t immediate) const {
    return {.peer = 1,
            .rail = rail,
            .source = local[0],
            .source_offset = 64,
            .target = transports[1]->remote(local[1]),
            .target_offset = 128,
            .bytes = bytes,
            .immediate = immediate,
            .context = immediate + 500u};
  }

  std::vector<Event> poll(size_t rank) {
    std::array<Event, 32> events{};
    const int32_t count = transports[rank]->poll(events);
    return {events.begin(), events.begin() + count};
  }

  // One write arrives with its bytes, and completes once.
  void expect_delivered(int32_t rail, int64_t bytes, uint32_t immediate) {
    const auto value = static_cast<std::byte>(immediate + 7);
    std::fill(memory[0].begin(), memory[0].end(), value);
    const Code code = transports[0]->write(write(rail, bytes, immediate));
    CHECK_EQ(transports[0]->error(), "");
    CHECK_EQ(code, Code::kOk);
    std::vector<Event> completions = poll(0);
    if (completions.empty()) completions = poll(0);
    CHECK_EQ(completions.size(), 1u);
    CHECK_EQ(completions[0].kind, EventKind::kCompletion);
    CHECK_EQ(completions[0].context, immediate + 500u);
    const std::vector<Event> arrivals = poll(1);
    CHECK_EQ(arrivals.size(), 1u);
    CHECK_EQ(arrivals[0].kind, EventKind::kArrival);
    CHECK_EQ(arrivals[0].immediate, immediate);
    CHECK_EQ(arrivals[0].rail, rail);
    for (int64_t i = 0; i < bytes; ++i) {
      CHECK(memory[1][static_cast<size_t>(128 + i)] == value);
    }
    CHECK(memory[1][static_cast<size_t>(128 + bytes)] != value);
    std::fill(memory[1].begin(), memory[1].end(), std::byte{1});
  }

  void expect_all_delivered() {
    uint32_t immediate = 0;
    for (int round = 0; round < 30; ++round) {
      for (int32_t rail = 0; rail < transports[0]->limits().rails; ++rail) {
        for (const int64_t bytes : {0, 1, 64, 65, 2000}) {
          expect_delivered(rail, bytes, immediate++ % 100);
        }
      }
    }
  }

  std::array<std::vector<std::byte>, 2> memory;
  std::array<std::unique_ptr<Transport>, 2> transports;
  std::array<LocalMemory, 2> local;
};

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

template <typename Error>
std::string message_of(const FakeBehaviour& behaviour, int32_t endpoints, int32_t nics) {
  try {
    World world(behaviour, endpoints, nics);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST(libfabric_provider_that_chooses_keys) {
  World world({.mr_mode = kVerbs});
  CHECK_EQ(world.transports[1]->remote(world.local[1]).base,
           reinterpret_cast<uint64_t>(world.memory[1].data()));
  world.expect_all_delivered();
  for (const void* descriptor : Fake::get().descriptors) CHECK(descriptor != nullptr);
}

TEST(libfabric_provider_with_a_key_for_each_of_two_nics) {
  World world({.mr_mode = kVerbs, .nics = {"nic0", "nic1"}}, 2, 2);
  CHECK_EQ(world.transports[0]->limits().rails, 4);
  world.expect_all_delivered();
}

TEST(libfabric_provider_with_the_callers_keys_on_many_nics) {
  World world({.nics = {"nic0", "nic1", "nic2"}}, 2, 3);
  CHECK_EQ(world.transports[0]->limits().rails, 6);
  CHECK_EQ(world.transports[1]->remote(world.local[1]).base, 0u);
  world.expect_all_delivered();
}

TEST(libfabric_provider_that_binds_registrations_to_endpoints) {
  World callers({.mr_mode = libfabric::kMrEndpoint}, 2);
  callers.expect_all_delivered();
  World providers({.mr_mode = kVerbs | libfabric::kMrEndpoint}, 2);
  providers.expect_all_delivered();
}

TEST(libfabric_provider_that_consumes_receives_and_contexts) {
  // More arrivals than there are receives, so the transport posts them again.
  World world({.mode = libfabric::kModeRxCqData | libfabric::kModeContext2});
  world.expect_all_delivered();
  World injecting({.mode = libfabric::kModeRxCqData, .inject_size = 64});
  injecting.expect_all_delivered();
}

TEST(libfabric_injects_small_writes) {
  World world({.inject_size = 64});
  world.expect_delivered(0, 64, 1);
  CHECK_EQ(Fake::get().injected, 1);
  world.expect_delivered(0, 65, 2);
  CHECK_EQ(Fake::get().injected, 1);
  world.expect_delivered(0, 0, 3);
  CHECK_EQ(Fake::get().injected, 2);
}

// The failure of an injected write does not name its peer.
TEST(libfabric_does_not_inject_writes_whose_failure_must_name_the_peer) {
  World world({.inject_size = 64});
  Write write = world.write(0, 0, 1);
  write.reported = true;
  CHECK_EQ(world.transports[0]->write(write), Code::kOk);
  CHECK_EQ(Fake::get().injected, 0);
  CHECK_EQ(world.poll(1).size(), 1u);
  CHECK(!world.transports[0]->probe(1));
}

TEST(libfabric_keeps_one_write_of_a_peer_that_has_no_room) {
  World world({.tx_size = 4, .again = 3});
  CHECK_EQ(world.transports[0]->write(world.write(0, 8, 1)), Code::kOk);     // waits
  CHECK_EQ(world.transports[0]->write(world.write(0, 8, 2)), Code::kAgain);  // behind it
  CHECK_EQ(world.transports[0]->error(), "");
  CHECK(world.poll(0).empty());
  CHECK(world.poll(0).empty());
  CHECK_EQ(world.poll(0).size(), 1u);
  CHECK_EQ(world.poll(1).size(), 1u);
  // And no more than the provider's queue holds are in flight.
  for (uint32_t i = 0; i < 4; ++i) {
    CHECK_EQ(world.transports[0]->write(world.write(0, 8, i)), Code::kOk);
  }
  CHECK_EQ(world.transports[0]->write(world.write(0, 8, 9)), Code::kAgain);
  CHECK_EQ(world.poll(0).size(), 4u);
  CHECK_EQ(world.transports[0]->write(world.write(0, 8, 9)), Code::kOk);
}

TEST(libfabric_error_of_a_write_fails_its_peer_once) {
  World world({.complete_with = EACCES});
  CHECK_EQ(world.transports[0]->write(world.write(0, 8, 1)), Code::kOk);
  CHECK_EQ(world.transports[0]->write(world.write(0, 8, 2)), Code::kOk);
  std::vector<Event> events;
  for (int i = 0; i < 5; ++i) {
    for (const Event& event : world.poll(0)) events.push_back(event);
  }
  CHECK_EQ(events.size(), 1u);
  CHECK_EQ(events[0].kind, EventKind::kPeerFailed);
  CHECK_EQ(events[0].peer, 1);
  Fake::get().behaviour.complete_with = 0;
  CHECK_EQ(world.transports[0]->write(world.write(0, 8, 3)), Code::kFailed);
  for (const char* part :
       {"libfabric:efa", "write", "peer 1", "rail 0", "no access", "the fake's own reason"}) {
    CHECK(contains(world.transports[0]->error(), part));
  }
}

TEST(libfabric_reports_failures_one_by_one_with_their_reasons) {
  World world({.complete_with = EACCES});
  CHECK_EQ(world.transports[0]->connect(2, world.transports[1]->address()), Code::kOk);
  for (const int32_t peer : {1, 2, 1}) {
    Write write = world.write(0, 8, 1);
    write.peer = peer;
    CHECK_EQ(world.transports[0]->write(write), Code::kOk);
  }
  for (const int32_t peer : {1, 2}) {
    const std::vector<Event> events = world.poll(0);
    CHECK_EQ(events.size(), 1u);
    CHECK_EQ(events[0].peer, peer);
    const std::string reason = "a write to peer " + std::to_string(peer);
    CHECK(contains(world.transports[0]->error(), reason.c_str()));
  }
  // The second failure of a peer says nothing new.
  const std::string said = world.transports[0]->error();
  for (int i = 0; i < 3; ++i) CHECK(world.poll(0).empty());
  CHECK_EQ(world.transports[0]->error(), said);
}

TEST(libfabric_write_that_the_provider_refuses_fails_its_peer) {
  World world({.refuse_with = EACCES});
  CHECK_EQ(world.transports[0]->write(world.write(0, 8, 1)), Code::kFailed);
  CHECK(contains(world.transports[0]->error(), "the write of 8 bytes to peer 1 on rail 0 fails"));
  const std::vector<Event> events = world.poll(0);
  CHECK_EQ(events.size(), 1u);
  CHECK_EQ(events[0].kind, EventKind::kPeerFailed);
}

TEST(libfabric_error_of_an_unknown_operation_fails_all_peers) {
  World world({});
  libfabric::fake_fail(*Fake::get().endpoints[0]->queue, nullptr, EACCES);
  std::vector<Event> events = world.poll(0);
  CHECK_EQ(events.size(), 1u);
  CHECK_EQ(events[0].kind, EventKind::kPeerFailed);
  CHECK_EQ(world.transports[0]->write(world.write(0, 8, 1)), Code::kFailed);
  CHECK(contains(world.transports[0]->error(), "an operation on rail 0 failed"));
}

// Such as an injected write to a peer that has ended: the peer is found by its port.
TEST(libfabric_error_of_an_unknown_operation_fails_those_that_listen_no_more) {
  for (const bool listens : {false, true}) {
    Listener listener;
    if (!listens) listener.close();
    World world({.provider = "tcp", .port = listener.port});
    libfabric::fake_fail(*Fake::get().endpoints[0]->queue, nullptr, ENOTCONN);
    std::vector<Event> events;
    for (int i = 0; i < 1'000'000 && events.empty(); ++i) events = world.poll(0);
    CHECK_EQ(events.size(), 1u);
    CHECK_EQ(events[0].kind, listens ? EventKind::kPeerFailed : EventKind::kPeerEnded);
    const std::string said = world.transports[0]->error();
    CHECK(contains(said, listens ? "an operation on rail 0 failed" : "peer 1 has ended"));
    // Another failure of the same peer is none.
    libfabric::fake_fail(*Fake::get().endpoints[0]->queue, nullptr, ENOTCONN);
    for (int i = 0; i < 1000; ++i) CHECK(world.poll(0).empty());
    CHECK_EQ(world.transports[0]->error(), said);
  }
}

TEST(libfabric_error_of_an_incoming_write_fails_nobody) {
  World world({});
  libfabric::fake_fail(*Fake::get().endpoints[0]->queue, nullptr, EACCES);
  Fake::get().endpoints[0]->queue->errors[0].flags = libfabric::kRemoteWrite;
  CHECK(world.poll(0).empty());
  CHECK_EQ(world.transports[0]->error(), "");
  CHECK_EQ(world.transports[0]->write(world.write(0, 8, 1)), Code::kOk);
  CHECK_EQ(world.poll(1).size(), 1u);
}

TEST(libfabric_refuses_more_keys_than_remote_memory_holds) {
  const FakeBehaviour three{.mr_mode = kVerbs, .nics = {"nic0", "nic1", "nic2"}};
  CHECK(contains(message_of<Unavailable>(three, 1, 3), "3 keys"));
  CHECK(contains(message_of<Unavailable>({.mr_mode = libfabric::kMrEndpoint}, 3, 1), "3 keys"));
  World wide({.mr_mode = kVerbs, .nics = {"nic0", "nic1"}, .first_provider_key = 1ull << 32}, 1, 2);
  CHECK_EQ(wide.local[0].index, -1);
  CHECK(contains(wide.transports[0]->error(), "more than 32 bits"));
  CHECK(contains(message_of<Unavailable>({.cq_data_size = 2}, 1, 1), "2 bytes of immediate data"));
}

TEST(libfabric_registers_a_bounded_number_of_ranges) {
  World world({});
  for (int32_t i = 1; i < kMostRegions; ++i) {
    CHECK_EQ(world.transports[0]->register_memory(world.memory[0].data(), 64).index, i);
  }
  CHECK_EQ(world.transports[0]->register_memory(world.memory[0].data(), 64).index, -1);
  CHECK(contains(world.transports[0]->error(), "at most 16 ranges"));
}

TEST(libfabric_closes_all_its_objects) {
  {
    World world({.mr_mode = kVerbs, .mode = libfabric::kModeRxCqData, .nics = {"a", "b"}}, 2, 2);
    CHECK(Fake::get().open_objects > 0);
    CHECK_EQ(world.transports[0]->write(world.write(0, 8, 1)), Code::kOk);
  }
  CHECK_EQ(Fake::get().open_objects, 0);
}
