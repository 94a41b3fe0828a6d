// Emulated GPUs of several hosts: for each rank the memory through which ranks of other hosts reach
// it, and a proxy that carries its commands over a loopback network. The emulated kernels push into
// the proxies' own rings.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "layout/low_latency_hosts.h"
#include "proxy/proxy.h"
#include "transport/loopback.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace fanfold {
namespace {

namespace loopback = transport::loopback;

struct Options {
  LowLatencyGeometry geometry;
  int32_t threads;     // of each proxy
  int32_t ring_slots;  // of each thread
  int32_t give_up_peers;
  double timeout_s;
  uint64_t seed;  // of a network that delays, reorders and repeats; 0: of one that does not
};

struct Rank {
  std::vector<std::byte> memory;  // what it receives, then its send area for each rank
  std::vector<uint64_t> counters;
  std::vector<RingView> rings;
  std::unique_ptr<proxy::Proxy> proxy;
  LowLatencyHosts hosts{};
};

struct Hosts {
  std::shared_ptr<loopback::Network> network;
  std::vector<Rank> ranks;
  int64_t bytes;  // of an area

  std::byte* area(Rank& rank, int64_t number) const {
    const auto at = reinterpret_cast<uintptr_t>(rank.memory.data());
    return rank.memory.data() +
           (align_up(static_cast<int64_t>(at), kAreaAlignment) - static_cast<int64_t>(at)) +
           number * bytes;
  }
};

// A poll passes little of the network's time, so that its delays last as long as the emulated kernels
// take to see what has come: else a word that overtakes its rows is not seen before them.
loopback::Options network_of(uint64_t seed) {
  loopback::Options options = seed == 0 ? loopback::Options{} : loopback::Options::hostile(seed);
  options.poll_ns = 100;
  return options;
}

void open_rank(Hosts& hosts, const Options& options, int32_t index, const int32_t* host_of) {
  const int32_t ranks = options.geometry.ranks;
  Rank& rank = hosts.ranks[static_cast<size_t>(index)];
  const int64_t bytes = hosts.bytes * (ranks + 1);
  rank.memory.resize(static_cast<size_t>(bytes + kAreaAlignment));
  rank.counters.resize(static_cast<size_t>(ranks) * kCounters);
  proxy::ProxyMemory memory{.data = hosts.area(rank, 0), .bytes = bytes, .counters = rank.counters};
  for (int32_t peer = 0; peer < ranks; ++peer) memory.sources.push_back((peer + 1) * hosts.bytes);
  std::vector<std::unique_ptr<transport::Transport>> transports;
  for (int32_t thread = 0; thread < options.threads; ++thread)
    transports.push_back(hosts.network->open(index, thread));
  proxy::ProxyOptions settings;
  settings.rank = index;
  settings.ranks = ranks;
  settings.threads = options.threads;
  settings.ring_slots = options.ring_slots;
  settings.timeout = std::chrono::nanoseconds(static_cast<int64_t>(options.timeout_s * 1e9));
  settings.give_up_peers = options.give_up_peers != 0;
  rank.proxy = std::make_unique<proxy::Proxy>(settings, memory, std::move(transports));
  // The ring of a peer is that of the thread which serves it.
  for (int32_t thread = 0; thread < options.threads; ++thread)
    rank.rings.push_back(rank.proxy->thread(thread).command_ring().view());
  rank.hosts.received = reinterpret_cast<unsigned char*>(hosts.area(rank, 0));
  rank.hosts.rings = rank.rings.data();
  rank.hosts.ring_count = options.threads;
  for (int32_t peer = 0; peer < ranks; ++peer)
    if (host_of[peer] != host_of[index]) rank.hosts.elsewhere[peer / 32] |= 1u << (peer % 32);
}

Rank& rank_of(Hosts* hosts, int32_t rank) { return hosts->ranks.at(static_cast<size_t>(rank)); }

}  // namespace
}  // namespace fanfold

using fanfold::Hosts;

// `host_of[rank]` is the number of a rank's host.
EXPORTED Hosts* hosts_open(const fanfold::Options* options, const int32_t* host_of) {
  auto hosts = std::make_unique<Hosts>();
  hosts->network = fanfold::loopback::Network::create(fanfold::network_of(options->seed));
  hosts->ranks.resize(static_cast<size_t>(options->geometry.ranks));
  hosts->bytes = fanfold::LowLatencyHostsLayout{options->geometry}.bytes();
  std::vector<fanfold::proxy::ProxyAddress> addresses;
  for (int32_t rank = 0; rank < options->geometry.ranks; ++rank) {
    fanfold::open_rank(*hosts, *options, rank, host_of);
    addresses.push_back(hosts->ranks[static_cast<size_t>(rank)].proxy->address());
  }
  for (fanfold::Rank& rank : hosts->ranks) {
    rank.proxy->connect(addresses);
    rank.proxy->start();
    rank.proxy->begin_busy();
  }
  return hosts.release();
}

EXPORTED void hosts_close(Hosts* hosts) { delete hosts; }

// Where `rank` stores what `peer`, of another host, is to have.
EXPORTED uintptr_t hosts_send_area(Hosts* hosts, int32_t rank, int32_t peer) {
  return reinterpret_cast<uintptr_t>(hosts->area(fanfold::rank_of(hosts, rank), peer + 1));
}

// Tells the kernels of `rank` of it.
EXPORTED void hosts_attach(Hosts* hosts, int32_t rank, std::byte* state) {
  fanfold::LowLatencyHosts* of_rank = &fanfold::rank_of(hosts, rank).hosts;
  std::memcpy(state + offsetof(fanfold::LowLatencyState, hosts), &of_rank, sizeof of_rank);
}

// What the proxy of `rank` has counted.
EXPORTED uint64_t hosts_commands(Hosts* hosts, int32_t rank) {
  return fanfold::rank_of(hosts, rank).proxy->stats().commands;
}
EXPORTED uint64_t hosts_duplicates(Hosts* hosts, int32_t rank) {
  return fanfold::rank_of(hosts, rank).proxy->stats().duplicates;
}
EXPORTED uint64_t hosts_reordered(Hosts* hosts, int32_t rank) {
  return fanfold::rank_of(hosts, rank).proxy->stats().reordered;
}

// Of its first ring.
EXPORTED uint64_t hosts_room(Hosts* hosts, int32_t rank) {
  const fanfold::RingView& ring = fanfold::rank_of(hosts, rank).rings.front();
  return ring.slots - (ring.head->next - ring.tail->consumed);
}
EXPORTED uint64_t hosts_abandoned(Hosts* hosts, int32_t rank) {
  return fanfold::rank_of(hosts, rank).rings.front().faults->abandoned;
}

EXPORTED void hosts_stop(Hosts* hosts, int32_t rank) {
  fanfold::rank_of(hosts, rank).proxy->stop();
}

// Nothing passes between two ranks from now on.
EXPORTED void hosts_cut(Hosts* hosts, int32_t rank, int32_t peer) {
  hosts->network->cut(rank, peer, fanfold::loopback::Network::kForever);
}

// Why the proxy of `rank` has failed; null if it runs.
EXPORTED const char* hosts_failure(Hosts* hosts, int32_t rank) {
  const fanfold::proxy::Failure* failure = fanfold::rank_of(hosts, rank).proxy->failure();
  return failure == nullptr ? nullptr : failure->text.c_str();
}
