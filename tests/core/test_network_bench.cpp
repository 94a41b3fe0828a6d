// The loops of `fanfold bench network`.
#include <vector>

#include "base/error.h"
#include "libfabric_pair.hpp"
#include "processes.hpp"
#include "transport/network_bench.h"

using namespace fanfold;
using namespace fanfold::transport;

namespace {

constexpr double kTimeout = 30.0;
constexpr int64_t kMost = 1 << 20;

void meet(NetworkBench& bench, int end, Pipes& pipes) {
  const std::vector<std::byte> address = bench.address();
  std::vector<std::byte> other(address.size());
  CHECK(pipes.put(end, address.data(), address.size()));
  CHECK(pipes.get(end, other.data(), other.size()));
  bench.connect(other);
}

// What both ranks call. Many short measurements, so that one begins while the peer still ends the
// one before.
double measure(NetworkBench& bench) {
  double seconds = 0.0;
  for (int repeat = 0; repeat < 20; ++repeat) {
    for (const Wire wire : {Wire::kPlain, Wire::kFanfold}) {
      for (const int64_t bytes : {8, 5000, 200'000}) {
        seconds += bench.stream(wire, {.bytes = bytes, .writes = 32, .window = 8});
        const RoundTrips times = bench.ping_pong(wire, bytes, 5);
        CHECK(times.p50_seconds > 0.0);
        CHECK(times.p99_seconds >= times.p50_seconds);
        seconds += times.p50_seconds;
      }
    }
  }
  return seconds;
}

}  // namespace

TEST(network_bench_measures_both_wires_between_processes) {
  if (left_out_without_libfabric("network_bench_measures_both_wires")) return;
  for (const char* setting : {"libfabric:tcp", "libfabric:shm"}) {
    Pipes pipes;
    Child child([&] {
      NetworkBench bench(setting, 1, kMost, kTimeout);
      meet(bench, 1, pipes);
      measure(bench);
      pause();
    });
    NetworkBench bench(setting, 0, kMost, kTimeout);
    meet(bench, 0, pipes);
    CHECK(measure(bench) > 0.0);
  }
}

TEST(network_bench_gives_up_a_peer_that_does_not_answer) {
  if (left_out_without_libfabric("network_bench_gives_up_a_peer")) return;
  NetworkBench silent("libfabric:shm", 1, kMost, kTimeout);
  for (const Wire wire : {Wire::kPlain, Wire::kFanfold}) {
    NetworkBench bench("libfabric:shm", 0, kMost, 0.05);
    bench.connect(silent.address());
    CHECK_THROWS(bench.ping_pong(wire, 8, 1), PeerTimeout);
    CHECK_THROWS(bench.stream(wire, {.bytes = 8, .writes = 4, .window = 2}), PeerTimeout);
  }
}

TEST(network_bench_refuses_what_is_out_of_bounds) {
  if (left_out_without_libfabric("network_bench_refuses")) return;
  CHECK_THROWS(NetworkBench("libfabric:shm", 2, kMost, kTimeout), BadArgument);
  CHECK_THROWS(NetworkBench("libfabric:shm", 0, 0, kTimeout), BadArgument);
  CHECK_THROWS(NetworkBench("libfabric:sockets", 0, kMost, kTimeout), BadArgument);
  NetworkBench bench("libfabric:shm", 0, kMost, kTimeout);
  CHECK_THROWS(bench.connect({}), BadArgument);
  CHECK_THROWS(bench.ping_pong(Wire::kPlain, kMost + 1, 1), BadArgument);
  CHECK_THROWS(bench.ping_pong(Wire::kPlain, 8, 0), BadArgument);
  CHECK_THROWS(bench.stream(Wire::kPlain, {.bytes = 8, .writes = 32, .window = 3}), BadArgument);
  CHECK_THROWS(bench.stream(Wire::kPlain, {.bytes = 8, .writes = 30, .window = 8}), BadArgument);
}
