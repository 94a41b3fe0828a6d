// Two transports over libfabric that write to each other, and what tests do where there is none.
#pragma once

#include <array>
#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.hpp"
#include "ranks.hpp"
#include "transport/libfabric.h"

namespace fanfold::transport {

// Far more polls than any write needs. A side that is polled in vain gives up its core now and
// then, so this bounds the seconds, too.
inline constexpr int64_t kMostPolls = 20'000'000;

// Whether libfabric is missing. Then the test is left out, and says so; where FANFOLD_REQUIRE_
// LIBFABRIC is on, as in CI, it fails instead.
inline bool left_out_without_libfabric([[maybe_unused]] const char* test) {
#if defined(FANFOLD_REQUIRE_LIBFABRIC)
  static_cast<void>(libfabric::library());  // throws Unavailable
  return false;
#else
  try {
    static_cast<void>(libfabric::library());
    return false;
  } catch (const Unavailable& error) {
    std::cout << "LEFT OUT " << test << ": " << error.what() << std::endl;
    return true;
  }
#endif
}

inline std::unique_ptr<Transport> open_on_this_host(const std::string& provider,
                                                    int32_t endpoints = 1) {
  return open_libfabric({.request = libfabric::parse_setting("libfabric:" + provider),
                         .endpoints_per_nic = endpoints});
}

// One rank: a transport with registered memory of its own.
struct Side {
  Side(const std::string& provider, int64_t bytes, int32_t endpoints = 1)
      : memory(static_cast<size_t>(bytes)), transport(open_on_this_host(provider, endpoints)) {
    local = transport->register_memory(memory.data(), bytes);
    CHECK(local.index >= 0);
  }

  // The side's own events since the last call of `poll`.
  void poll() {
    std::array<Event, 32> room{};
    const int32_t count = transport->poll(room);
    for (int32_t i = 0; i < count; ++i) {
      const Event& event = room[static_cast<size_t>(i)];
      if (event.kind == EventKind::kArrival) arrivals.push_back(event);
      if (event.kind == EventKind::kCompletion) completions.push_back(event);
      if (event.kind == EventKind::kPeerFailed || event.kind == EventKind::kPeerEnded) {
        failures.push_back(event);
      }
    }
  }

  std::vector<std::byte> memory;  // before the transport, which must not outlive it
  LocalMemory local;
  std::vector<Event> arrivals;
  std::vector<Event> completions;
  std::vector<Event> failures;
  std::unique_ptr<Transport> transport;
};

// Two ranks in one process, polled in turns.
struct Pair {
  Pair(const std::string& provider, int64_t bytes, int32_t endpoints = 1)
      : sides{Side(provider, bytes, endpoints), Side(provider, bytes, endpoints)} {
    for (int32_t rank = 0; rank < 2; ++rank) {
      Transport& ours = *at(rank).transport;
      CHECK_EQ(ours.connect(1 - rank, at(1 - rank).transport->address()), Code::kOk);
    }
  }

  Side& at(int32_t rank) { return sides[static_cast<size_t>(rank)]; }
  void poll() {
    for (Side& side : sides) side.poll();
  }

  // A write of `rank` to the same offset of the other's memory.
  Write write_of(int32_t rank, int64_t offset, int64_t bytes, uint32_t immediate) {
    Side& to = at(1 - rank);
    return {.peer = 1 - rank,
            .rail = 0,
            .source = at(rank).local,
            .source_offset = offset,
            .target = to.transport->remote(to.local),
            .target_offset = offset,
            .bytes = bytes,
            .immediate = immediate,
            .context = immediate + uint64_t{1000}};
  }

  // Writes, polling both sides as long as there is no room.
  void send(int32_t rank, const Write& write) {
    Code code = Code::kAgain;
    for (int64_t i = 0; i < kMostPolls && code == Code::kAgain; ++i) {
      code = at(rank).transport->write(write);
      if (code == Code::kAgain) poll();
    }
    if (code == Code::kFailed) CHECK_EQ(at(rank).transport->error(), "");  // prints the error
    CHECK_EQ(code, Code::kOk);
  }

  // Polls until both sides have seen that many arrivals and completions in all.
  void await(size_t arrivals, size_t completions) {
    const auto sum = [&](auto member) { return (at(0).*member).size() + (at(1).*member).size(); };
    for (int64_t i = 0; i < kMostPolls; ++i) {
      if (sum(&Side::arrivals) >= arrivals && sum(&Side::completions) >= completions) break;
      poll();
    }
    CHECK_EQ(sum(&Side::arrivals), arrivals);
    CHECK_EQ(sum(&Side::completions), completions);
  }

  std::array<Side, 2> sides;
};

}  // namespace fanfold::transport
