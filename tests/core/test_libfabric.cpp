// The transport over libfabric, on the providers that every machine has: sockets and shared memory.
#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <utility>

#include "libfabric_pair.hpp"
#include "processes.hpp"
#include "transport/libfabric_address.h"

using namespace fanfold;
using namespace fanfold::transport;

namespace {

constexpr const char* kProviders[] = {"tcp", "shm"};
constexpr int64_t kBytes = int64_t{1} << 21;

void fill(std::vector<std::byte>& memory, uint64_t seed) {
  Random random(seed);
  for (std::byte& byte : memory) byte = static_cast<std::byte>(random.next());
}

bool same(const Side& a, const Side& b, int64_t offset, int64_t bytes) {
  return std::memcmp(a.memory.data() + offset, b.memory.data() + offset,
                     static_cast<size_t>(bytes)) == 0;
}

// As a killed process leaves them, by the names that the provider shm gives to the endpoints of
// this process.
class FilesOfKilledEndpoints {
 public:
  FilesOfKilledEndpoints() {
    for (int i = 0; i < kFiles; ++i) std::ofstream(file(i)) << std::string(4096, '\0');
  }
  ~FilesOfKilledEndpoints() {
    for (int i = 0; i < kFiles; ++i) std::filesystem::remove(file(i));
  }
  FilesOfKilledEndpoints(const FilesOfKilledEndpoints&) = delete;
  FilesOfKilledEndpoints& operator=(const FilesOfKilledEndpoints&) = delete;

 private:
  static constexpr int kFiles = 1000;

  static std::string file(int i) {
    return "/dev/shm/" + std::to_string(getpid()) + ":" + std::to_string(getuid()) + ":" +
           std::to_string(i);
  }
};

struct Meeting {
  int32_t rank;
  int32_t peer;
};

// Exchanges addresses and memory with the other process. Returns the peer's memory.
RemoteMemory meet(Side& side, Pipes& pipes, Meeting who) {
  const int end = who.rank == 0 ? 0 : 1;
  const Address address = side.transport->address();
  const RemoteMemory memory = side.transport->remote(side.local);
  CHECK(pipes.put(end, address.data(), address.size()));
  CHECK(pipes.put(end, &memory, sizeof memory));
  Address other(address.size());
  RemoteMemory other_memory;
  CHECK(pipes.get(end, other.data(), other.size()));
  CHECK(pipes.get(end, &other_memory, sizeof other_memory));
  CHECK_EQ(side.transport->connect(who.peer, other), Code::kOk);
  return other_memory;
}

// A write from and to the begin of the memories. Its immediate is its number of bytes.
Write write_to(const Side& side, int32_t peer, const RemoteMemory& memory, uint32_t bytes) {
  return {.peer = peer,
          .rail = 0,
          .source = side.local,
          .source_offset = 0,
          .target = memory,
          .target_offset = 0,
          .bytes = bytes,
          .immediate = bytes,
          .context = 0};
}

// Sends every write back to where it came from, as long as the process lives.
void echo(const std::string& provider, Pipes& pipes) {
  Side side(provider, kBytes);
  const RemoteMemory parent = meet(side, pipes, {.rank = 1, .peer = 0});
  for (int64_t i = 0; i < kMostPolls * 100; ++i) {
    side.poll();
    while (!side.arrivals.empty()) {
      Write back = write_to(side, 0, parent, side.arrivals.back().immediate);
      back.target_offset = kBytes / 2;
      if (side.transport->write(back) != Code::kOk) break;
      side.arrivals.pop_back();
    }
    sched_yield();
  }
}

// Writes random bytes to a peer that runs `echo`, and compares them with what the peer writes back.
void expect_echo(Side& side, int32_t peer, const RemoteMemory& memory, uint32_t bytes) {
  fill(side.memory, bytes);
  const std::string failed_before = side.transport->error();
  const Write write = write_to(side, peer, memory, bytes);
  Code code = Code::kAgain;
  side.arrivals.clear();
  for (int64_t i = 0; i < kMostPolls && side.arrivals.empty() && code != Code::kFailed; ++i) {
    if (code == Code::kAgain) code = side.transport->write(write);
    side.poll();
    sched_yield();
  }
  CHECK_EQ(side.transport->error(), failed_before);
  CHECK_EQ(side.arrivals.size(), 1u);
  CHECK_EQ(side.arrivals[0].immediate, bytes);
  CHECK_EQ(std::memcmp(side.memory.data(), side.memory.data() + kBytes / 2, bytes), 0);
}

}  // namespace

TEST(libfabric_delivers_bytes_before_their_immediate) {
  if (left_out_without_libfabric("libfabric_delivers_bytes_before_their_immediate")) return;
  for (const char* provider : kProviders) {
    Pair pair(provider, kBytes);
    Random random(7);
    size_t sent = 0;
    for (const int64_t bytes : {1, 8, 64, 128, 129, 4096, 4097, 65536, 1 << 20}) {
      for (const int32_t rank : {0, 1}) {
        fill(pair.at(rank).memory, random.next());
        const int64_t offset = random.between(0, static_cast<int32_t>(kBytes - bytes));
        pair.send(rank, pair.write_of(rank, offset, bytes, static_cast<uint32_t>(bytes)));
        // The bytes are there when the arrival is reported: no later poll is needed.
        const size_t seen = pair.at(1 - rank).arrivals.size();
        for (int64_t i = 0; i < kMostPolls && pair.at(1 - rank).arrivals.size() == seen; ++i) {
          pair.poll();
        }
        CHECK(same(pair.at(0), pair.at(1), offset, bytes));
        CHECK_EQ(pair.at(1 - rank).arrivals.back().immediate, static_cast<uint32_t>(bytes));
        ++sent;
      }
    }
    pair.await(sent, sent);
  }
}

TEST(libfabric_carries_every_immediate_without_bytes) {
  if (left_out_without_libfabric("libfabric_carries_every_immediate_without_bytes")) return;
  for (const char* provider : kProviders) {
    Pair pair(provider, kBytes);
    std::vector<std::byte> before = pair.at(1).memory;
    const std::vector<uint32_t> immediates = {0, 1, 0x7fffffff, 0x80000000, 0xffffffff};
    for (const uint32_t immediate : immediates) {
      Write write = pair.write_of(0, 0, 0, immediate);
      write.source = {};  // a write without bytes names no memory
      write.target = {};
      pair.send(0, write);
    }
    pair.await(immediates.size(), immediates.size());
    std::multiset<uint32_t> arrived;
    for (const Event& event : pair.at(1).arrivals) arrived.insert(event.immediate);
    CHECK(arrived == std::multiset<uint32_t>(immediates.begin(), immediates.end()));
    CHECK(before == pair.at(1).memory);
  }
}

TEST(libfabric_refuses_writes_when_full_and_loses_none) {
  if (left_out_without_libfabric("libfabric_refuses_writes_when_full_and_loses_none")) return;
  for (const char* provider : kProviders) {
    Pair pair(provider, kBytes);
    fill(pair.at(0).memory, 11);
    pair.send(0, pair.write_of(0, 0, 0, 0));  // connects
    pair.await(1, 1);
    uint32_t sent = 1;
    Code code = Code::kOk;
    while (code == Code::kOk && sent < 100'000) {
      code = pair.at(0).transport->write(pair.write_of(0, 8 * sent, 8, sent));
      if (code == Code::kOk) ++sent;
    }
    CHECK_EQ(code, Code::kAgain);
    CHECK(std::cmp_less_equal(sent, pair.at(0).transport->limits().writes + 1));
    pair.await(sent, sent);
    std::set<uint32_t> arrived;
    for (const Event& event : pair.at(1).arrivals) arrived.insert(event.immediate);
    CHECK_EQ(arrived.size(), sent);
    std::set<uint64_t> completed;
    for (const Event& event : pair.at(0).completions) completed.insert(event.context);
    CHECK_EQ(completed.size(), sent);
    CHECK(same(pair.at(0), pair.at(1), 8, 8 * (int64_t{sent} - 1)));
    pair.send(0, pair.write_of(0, 0, 8, 1));  // and there is room again
    pair.await(sent + 1, sent + 1);
  }
}

TEST(libfabric_spreads_writes_over_rails_in_both_directions) {
  if (left_out_without_libfabric("libfabric_spreads_writes_over_rails")) return;
  for (const char* provider : kProviders) {
    Pair pair(provider, kBytes, 3);
    CHECK_EQ(pair.at(0).transport->limits().rails, 3);
    // The upper half of each memory is written by the other side.
    fill(pair.at(0).memory, 13);
    std::copy(pair.at(0).memory.begin(), pair.at(0).memory.end(), pair.at(1).memory.begin());
    Random random(17);
    const size_t rounds = 600 / kRoundsShare;
    for (size_t i = 0; i < rounds; ++i) {
      const int32_t rank = random.between(0, 1);
      const int64_t bytes = random.between(0, 5000);
      Write write =
          pair.write_of(rank, random.between(0, 100'000), bytes, static_cast<uint32_t>(i));
      write.rail = random.between(0, 2);
      pair.send(rank, write);
    }
    pair.await(rounds, rounds);
    std::set<int32_t> rails;
    std::set<uint32_t> arrived;
    for (const int32_t rank : {0, 1}) {
      for (const Event& event : pair.at(rank).arrivals) {
        rails.insert(event.rail);
        arrived.insert(event.immediate);
      }
    }
    CHECK_EQ(rails, (std::set<int32_t>{0, 1, 2}));
    CHECK_EQ(arrived.size(), rounds);
  }
}

TEST(libfabric_poll_stores_no_more_events_than_there_is_room) {
  if (left_out_without_libfabric("libfabric_poll_stores_no_more_events")) return;
  for (const char* provider : kProviders) {
    Pair pair(provider, kBytes);
    for (uint32_t i = 0; i < 20; ++i) pair.send(0, pair.write_of(0, 8 * i, 8, i));
    std::set<uint32_t> arrived;
    for (const Event& event : pair.at(1).arrivals) arrived.insert(event.immediate);
    for (int64_t i = 0; i < kMostPolls && arrived.size() < 20; ++i) {
      std::array<Event, 2> room{};
      room[1].immediate = 0xabcd;
      CHECK_EQ(pair.at(1).transport->poll({}), 0);
      const int32_t count = pair.at(1).transport->poll({room.data(), 1});
      CHECK(count == 0 || count == 1);
      CHECK_EQ(room[1].immediate, 0xabcdu);
      if (count == 1) arrived.insert(room[0].immediate);
      pair.at(0).poll();
    }
    CHECK_EQ(arrived.size(), 20u);
  }
}

TEST(libfabric_reports_wrong_writes_as_values) {
  if (left_out_without_libfabric("libfabric_reports_wrong_writes_as_values")) return;
  Pair pair("shm", kBytes);
  Transport& transport = *pair.at(0).transport;
  const auto refused = [&](const char* part, const std::function<void(Write&)>& change) {
    Write write = pair.write_of(0, 0, 64, 1);
    change(write);
    CHECK_EQ(transport.write(write), Code::kFailed);
    CHECK(transport.error().find(part) != std::string::npos);
  };
  refused("peer 2 is not connected", [](Write& write) { write.peer = 2; });
  refused("peer -1 is not connected", [](Write& write) { write.peer = -1; });
  refused("rail is 1, but must be from 0 to 0", [](Write& write) { write.rail = 1; });
  refused("source is not registered", [](Write& write) { write.source.index = 5; });
  refused("source offset", [](Write& write) { write.source_offset = kBytes - 63; });
  refused("target offset", [](Write& write) { write.target_offset = -1; });
  refused("number of bytes", [](Write& write) { write.bytes = (int64_t{1} << 30) + 1; });
  CHECK_EQ(transport.register_memory(nullptr, 8).index, -1);
  CHECK_EQ(transport.connect(1, pair.at(1).transport->address()), Code::kFailed);
  CHECK(transport.error().find("connected already") != std::string::npos);
  CHECK_EQ(transport.connect(3, Address(7)), Code::kFailed);
  Address other = pair.at(1).transport->address();
  std::memcpy(other.data() + 8, "efa", 4);  // the name of the provider
  CHECK_EQ(transport.connect(3, other), Code::kFailed);
  CHECK(transport.error().find("which opened efa") != std::string::npos);
  pair.send(0, pair.write_of(0, 0, 64, 1));  // the transport still works
  pair.await(1, 1);
}

TEST(libfabric_open_says_what_is_missing) {
  if (left_out_without_libfabric("libfabric_open_says_what_is_missing")) return;
  std::string message;
  try {
    open_libfabric({.request = libfabric::parse_setting("libfabric:tcp:no-such-nic")});
  } catch (const Unavailable& error) {
    message = error.what();
  }
  CHECK(message.find("no usable network for tcp on no-such-nic") != std::string::npos);
  CHECK(message.find("apt install libfabric1") != std::string::npos);
  CHECK_THROWS(open_on_this_host("tcp", 0), BadArgument);
  CHECK_THROWS(open_on_this_host("tcp", kMostRails + 1), BadArgument);
}

TEST(libfabric_shm_opens_beside_files_of_the_killed) {
  if (left_out_without_libfabric("libfabric_shm_opens_beside_files_of_the_killed")) return;
  const FilesOfKilledEndpoints files;
  Pair pair("shm", kBytes);
  CHECK_EQ(pair.at(0).transport->write(pair.write_of(0, 0, 64, 1)), Code::kOk);
}

TEST(libfabric_leaves_signals_to_the_program) {
  if (left_out_without_libfabric("libfabric_leaves_signals_to_the_program")) return;
  libfabric::library();
  for (const int number : {SIGINT, SIGTERM}) {
    struct sigaction action{};
    CHECK_EQ(sigaction(number, nullptr, &action), 0);
    if (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) continue;
    // The provider shm, which another test may have opened, removes its files and goes on.
    Dl_info found{};
    CHECK(dladdr(reinterpret_cast<void*>(action.sa_handler), &found) != 0);
    CHECK(std::string(found.dli_fname).find("libfabric.so") != std::string::npos);
  }
}

TEST(libfabric_finds_the_networks_of_this_host) {
  if (left_out_without_libfabric("libfabric_finds_the_networks_of_this_host")) return;
  std::set<std::string> usable;
  for (const libfabric::Network& network : libfabric::find_networks()) {
    if (network.refusal.empty()) usable.insert(network.provider);
    CHECK_EQ(network.loopback, network.nic == "lo" || network.nic == "shm");
  }
  CHECK(usable.contains("shm"));
  CHECK(usable.contains("tcp") || usable.contains("net") || usable.contains("tcp;ofi_rxm"));
}

TEST(libfabric_writes_between_processes) {
  if (left_out_without_libfabric("libfabric_writes_between_processes")) return;
  for (const char* provider : kProviders) {
    Pipes pipes;
    Child child([&] { echo(provider, pipes); });
    Side side(provider, kBytes);
    const RemoteMemory other = meet(side, pipes, {.rank = 0, .peer = 1});
    for (const uint32_t bytes : {8u, 4096u, 100'000u, 8u}) expect_echo(side, 1, other, bytes);
  }
}

// What a peer of another job writes, which takes the transport for one that has left this port. The
// peers of this one go on.
TEST(libfabric_takes_nothing_from_strangers) {
  if (left_out_without_libfabric("libfabric_takes_nothing_from_strangers")) return;
  Pair pair("tcp", kBytes);
  Pair gone("tcp", kBytes);
  Side stranger("tcp", kBytes);
  // The keys of the one that has left, at the place of the one that is there now.
  Address stale = pair.at(0).transport->address();
  const Address before = gone.at(0).transport->address();
  const size_t keys =
      sizeof(libfabric::AddressHead) + offsetof(libfabric::AddressRail, landing_key);
  std::memcpy(stale.data() + keys, before.data() + keys, sizeof(uint64_t));
  CHECK_EQ(stranger.transport->connect(1, stale), Code::kOk);
  Side& left = gone.at(0);
  for (const int64_t bytes : {int64_t{0}, int64_t{64}, int64_t{100'000}}) {
    const Write write{.peer = 1,
                      .rail = 0,
                      .source = stranger.local,
                      .source_offset = 0,
                      .target = left.transport->remote(left.local),
                      .target_offset = 0,
                      .bytes = bytes,
                      .immediate = 65777,
                      .context = 1};
    for (int i = 0; i < 20'000; ++i) {
      if (i % 1000 == 0) stranger.transport->write(write);
      stranger.poll();
      pair.poll();
    }
  }
  CHECK(pair.at(0).arrivals.empty());
  CHECK(pair.at(0).failures.empty());
  CHECK(std::ranges::all_of(pair.at(0).memory, [](std::byte each) { return each == std::byte{}; }));
  for (const uint32_t immediate : {7u, 8u}) {
    pair.send(1, pair.write_of(1, 0, 64, immediate));
    for (int64_t i = 0; i < kMostPolls && pair.at(0).arrivals.empty(); ++i) pair.poll();
    CHECK_EQ(pair.at(0).arrivals.size(), size_t{1});
    CHECK_EQ(pair.at(0).arrivals[0].immediate, immediate);
    pair.at(0).arrivals.clear();
  }
}

// Of itself no provider here reports a dead peer: libfabric 1.17 connects again and again over
// sockets, or says only that some injected write has failed, and shm does not notice. The transport
// must neither throw nor hang nor lose its other peers.
TEST(libfabric_keeps_its_other_peers_when_a_process_ends) {
  if (left_out_without_libfabric("libfabric_keeps_its_other_peers")) return;
  for (const auto& [provider, bytes_to_dead] :
       {std::pair("tcp", 4096u), std::pair("tcp", 8u), std::pair("shm", 4096u)}) {
    Pipes first_pipes;
    Pipes second_pipes;
    Child first([&] { echo(provider, first_pipes); });
    Child second([&] { echo(provider, second_pipes); });
    Side side(provider, kBytes);
    const RemoteMemory first_memory = meet(side, first_pipes, {.rank = 0, .peer = 1});
    const RemoteMemory second_memory = meet(side, second_pipes, {.rank = 0, .peer = 2});
    expect_echo(side, 1, first_memory, 64);
    first.end();
    int32_t accepted = 0;
    Code code = Code::kOk;
    for (int i = 0; i < 20'000; ++i) {
      code = side.transport->write(write_to(side, 1, first_memory, bytes_to_dead));
      if (code == Code::kOk) ++accepted;
      side.poll();
    }
    CHECK(code != Code::kOk);
    CHECK(accepted <= side.transport->limits().writes);
    for (const Event& failure : side.failures) CHECK_EQ(failure.peer, 1);
    for (const uint32_t bytes : {8u, 100'000u}) expect_echo(side, 2, second_memory, bytes);
  }
}

// A child closes what it has inherited, and the parent's connections go on.
TEST(libfabric_survives_a_forked_child_that_closes) {
  if (left_out_without_libfabric("libfabric_survives_a_forked_child_that_closes")) return;
  for (const char* provider : kProviders) {
    Pipes pipes;
    Child other([&] { echo(provider, pipes); });
    Side side(provider, kBytes);
    const RemoteMemory memory = meet(side, pipes, {.rank = 0, .peer = 1});
    expect_echo(side, 1, memory, 64);
    Pipes closed;
    Child child([&] {
      side.transport.reset();
      closed.put(1, "c", 1);
    });
    char letter = 0;
    CHECK(closed.get(0, &letter, 1));
    for (const uint32_t bytes : {8u, 100'000u}) expect_echo(side, 1, memory, bytes);
  }
}

// The proxies of a rank may be asked at any time, also while they are written to.
TEST(libfabric_asks_sockets_whether_a_process_has_ended) {
  if (left_out_without_libfabric("libfabric_asks_sockets_whether_a_process_has_ended")) return;
  Pipes first_pipes;
  Pipes second_pipes;
  Child first([&] { echo("tcp", first_pipes); });
  Child second([&] { echo("tcp", second_pipes); });
  Side side("tcp", kBytes);
  meet(side, first_pipes, {.rank = 0, .peer = 1});
  const RemoteMemory memory = meet(side, second_pipes, {.rank = 0, .peer = 2});
  for (int round = 0; round < 200; ++round) {
    CHECK(side.transport->probe(1));
    CHECK(side.transport->probe(2));
    expect_echo(side, 2, memory, 64);
  }
  CHECK_EQ(side.failures.size(), 0u);
  first.end();
  for (int64_t i = 0; i < kMostPolls && side.failures.empty(); ++i) {
    side.transport->probe(1);
    side.poll();
  }
  CHECK_EQ(side.failures.size(), 1u);
  CHECK_EQ(side.failures[0].peer, 1);
  CHECK_EQ(side.failures[0].kind, EventKind::kPeerEnded);
  CHECK(side.transport->error().find("peer 1 has ended") != std::string::npos);
  CHECK(side.transport->error().find(" port ") != std::string::npos);
  CHECK_EQ(side.transport->write(write_to(side, 1, memory, 8)), Code::kFailed);
  for (const uint32_t bytes : {8u, 100'000u}) expect_echo(side, 2, memory, bytes);
  CHECK(!Side("shm", kBytes).transport->probe(1));
}
