// Ranks of a loopback network, for tests that look at single events.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/loopback.h"
#include "transport_contract.hpp"

namespace fanfold::transport::loopback {

using NetworkPtr = std::shared_ptr<Network>;

inline contract::Factory on(const NetworkPtr& network) {
  return [network](int32_t count, int32_t /*rails*/) {
    contract::Ranks ranks;
    for (int32_t rank = 0; rank < count; ++rank) ranks.push_back(network->open(rank));
    contract::connect_all(ranks);
    return ranks;
  };
}

struct Small {
  explicit Small(const Options& options, int32_t ranks = 2, int64_t bytes = 1 << 20)
      : network(Network::create(options)), world(on(network), ranks, options.rails, bytes) {}

  std::vector<Event> poll(int32_t rank, size_t span = 64) {
    std::vector<Event> events(span);
    events.resize(contract::index(transport(rank).poll(events)));
    return events;
  }
  // Polls once, and counts events of one kind.
  int64_t count(int32_t rank, EventKind kind) {
    int64_t of_kind = 0;
    for (const Event& event : poll(rank)) of_kind += event.kind == kind ? 1 : 0;
    return of_kind;
  }
  int64_t arrivals(int32_t rank) { return count(rank, EventKind::kArrival); }
  int64_t completions(int32_t rank) { return count(rank, EventKind::kCompletion); }
  Transport& transport(int32_t rank) { return *world.transports[contract::index(rank)]; }

  // A write of 64 bytes between the first bytes of both memories.
  Write write(int32_t from, int32_t to) {
    return Write{.peer = to,
                 .rail = 0,
                 .source = world.local[contract::index(from)],
                 .source_offset = 0,
                 .target = world.remote[contract::index(to)],
                 .target_offset = 0,
                 .bytes = 64,
                 .immediate = 0,
                 .context = 0};
  }

  std::byte* target_of(size_t write) {
    const contract::Posted& posted = world.posted[write];
    return &world.targets[contract::index(posted.to)][contract::index(posted.target_offset)];
  }
  bool landed(uint32_t write) {
    return contract::filled(target_of(write), write, world.posted[write].bytes);
  }

  NetworkPtr network;
  contract::World world;
};

}  // namespace fanfold::transport::loopback
