#include "transport/network_bench.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "transport/network_bench_sides.h"

namespace fanfold::transport {
namespace {

using Clock = std::chrono::steady_clock;

// The memory of each side. Writes go round in it, so that large ones do not stay in a cache.
constexpr int64_t kMemoryBytes = int64_t{16} << 20;
constexpr uint32_t kPollsPerLook = 256;

// Ends a loop over polls in which `actual` no longer changes. Gives the core up now and then,
// because ranks may outnumber the cores that are free.
class Bound {
 public:
  Bound(double seconds, int32_t rank, const char* phase)
      : seconds_(seconds), rank_(rank), phase_(phase) {}

  void check(int64_t expected, int64_t actual) {
    if (++polls_ % kPollsPerLook != 0) return;
    sched_yield();  // the peer may be waiting for this core
    const Clock::time_point now = Clock::now();
    if (actual != last_) since_ = now;
    last_ = actual;
    if (std::chrono::duration<double>(now - since_).count() < seconds_) return;
    throw PeerTimeout({.rank = rank_,
                       .peer = 1 - rank_,
                       .phase = phase_,
                       .expected = expected,
                       .actual = actual,
                       .seconds = seconds_,
                       .peer_gone = false});
  }

 private:
  double seconds_;
  int32_t rank_;
  const char* phase_;
  int64_t last_ = -1;
  Clock::time_point since_;
  uint32_t polls_ = 0;
};

struct Turn {
  int32_t rank;
  double timeout_seconds;
};

template <typename Side>
void send_one(Side& side, int64_t offset, int64_t bytes, Bound& bound) {
  while (!side.send(offset, bytes, 1)) {
    side.poll();
    bound.check(side.sent + 1, side.sent);
  }
}

template <typename Side>
void await_arrivals(Side& side, int64_t count, Bound& bound) {
  side.expected += count;
  while (side.arrived < side.expected) {
    side.poll();
    bound.check(side.expected, side.arrived);
  }
}

// Both sides leave a measurement together: rank 1 drives the network until rank 0 is done with it.
template <typename Side>
void finish(Side& side, const Turn& turn, Bound& bound) {
  if (turn.rank == 0) send_one(side, 0, 0, bound);
  if (turn.rank == 1) await_arrivals(side, 1, bound);
  while (side.completed < side.sent) {
    side.poll();
    bound.check(side.sent, side.completed);
  }
}

template <typename Side>
RoundTrips ping_pong(Side& side, const Turn& turn, int64_t bytes, int64_t rounds) {
  Bound bound(turn.timeout_seconds, turn.rank, "ping-pong of the network bench");
  std::vector<double> seconds;
  seconds.reserve(static_cast<size_t>(rounds));
  for (int64_t round = 0; round < rounds; ++round) {
    const Clock::time_point begin = Clock::now();
    if (turn.rank == 0) send_one(side, 0, bytes, bound);
    await_arrivals(side, 1, bound);
    if (turn.rank == 1) send_one(side, 0, bytes, bound);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  finish(side, turn, bound);
  std::sort(seconds.begin(), seconds.end());
  return {.p50_seconds = seconds[seconds.size() / 2],
          .p99_seconds = seconds[seconds.size() * 99 / 100]};
}

template <typename Side>
double stream(Side& side, const Turn& turn, const Stream& stream) {
  Bound bound(turn.timeout_seconds, turn.rank, "stream of the network bench");
  const int64_t chunk = stream.window / 2;  // of which the peer acknowledges each
  const int64_t slots = std::max<int64_t>(1, kMemoryBytes / std::max<int64_t>(stream.bytes, 1));
  const int64_t acknowledged = side.expected;
  const int64_t sent = side.sent;
  const int64_t completed = side.completed;
  const Clock::time_point begin = Clock::now();
  if (turn.rank == 0) {
    while (side.arrived - acknowledged < stream.writes / chunk) {
      const int64_t posted = side.sent - sent;
      const bool room = posted - (side.completed - completed) < stream.window &&
                        posted - (side.arrived - acknowledged) * chunk < 2 * stream.window;
      const int64_t offset = posted % slots * stream.bytes;
      if (posted < stream.writes && room && side.send(offset, stream.bytes, 1)) continue;
      side.poll();
      bound.check(stream.writes, side.sent + side.completed + side.arrived);
    }
    side.expected += stream.writes / chunk;
  } else {
    for (int64_t seen = chunk; seen <= stream.writes; seen += chunk) {
      await_arrivals(side, chunk, bound);
      send_one(side, 0, 0, bound);
    }
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  finish(side, turn, bound);
  return seconds;
}

}  // namespace

struct NetworkBench::State {
  // What each rank gathers of the other.
  struct Head {
    PlainSide::Place plain;
    RemoteMemory remote;
  };

  State(const std::string& setting, Turn turn_, int64_t most_bytes_)
      : turn(turn_), most_bytes(most_bytes_), request(with_node(setting)),
        memory(2 * static_cast<size_t>(kMemoryBytes)),
        plain(libfabric::library(), request, memory.data(), kMemoryBytes),
        fanfold(request, memory.data() + kMemoryBytes, kMemoryBytes),
        name(fanfold.transport().name()) {}

  // Both sides choose the same NIC, wherever the thread runs at that moment.
  static libfabric::Request with_node(const std::string& setting) {
    libfabric::Request request = libfabric::parse_setting(setting);
    request.numa_node = libfabric::numa_node_of_thread();
    request.nics_wanted = 1;
    return request;
  }

  void check(int64_t bytes, int64_t count) const {
    if (bytes < 0 || bytes > most_bytes) {
      throw BadArgument("bytes", std::to_string(bytes), "from 0 to " + std::to_string(most_bytes));
    }
    if (count < 1) throw BadArgument("count", std::to_string(count), "at least 1");
  }

  Turn turn;
  int64_t most_bytes;
  libfabric::Request request;
  std::vector<std::byte> memory;
  PlainSide plain;
  FanfoldSide fanfold;
  std::string name;
};

NetworkBench::NetworkBench(const std::string& setting, int32_t rank, int64_t most_bytes,
                           double timeout_seconds) {
  if (rank < 0 || rank > 1) throw BadArgument("rank", std::to_string(rank), "0 or 1");
  if (most_bytes < 1 || most_bytes > kMemoryBytes) {
    throw BadArgument("most_bytes", std::to_string(most_bytes),
                      "from 1 to " + std::to_string(kMemoryBytes));
  }
  state_ = std::make_unique<State>(setting, Turn{rank, timeout_seconds}, most_bytes);
}

NetworkBench::~NetworkBench() = default;

const std::string& NetworkBench::name() const { return state_->name; }

std::vector<std::byte> NetworkBench::address() const {
  const State::Head head{.plain = state_->plain.place(), .remote = state_->fanfold.remote()};
  const Address of_transport = state_->fanfold.transport().address();
  std::vector<std::byte> address(sizeof head + of_transport.size());
  std::memcpy(address.data(), &head, sizeof head);
  std::copy(of_transport.begin(), of_transport.end(), address.begin() + sizeof head);
  return address;
}

void NetworkBench::connect(const std::vector<std::byte>& address) {
  State::Head head{};
  if (address.size() < sizeof head) {
    throw BadArgument("address", std::to_string(address.size()) + " bytes", "that of the peer");
  }
  std::memcpy(&head, address.data(), sizeof head);
  state_->plain.connect(head.plain);
  state_->fanfold.connect(1 - state_->turn.rank, {address.begin() + sizeof head, address.end()},
                          head.remote);
}

RoundTrips NetworkBench::ping_pong(Wire wire, int64_t bytes, int64_t rounds) {
  state_->check(bytes, rounds);
  return wire == Wire::kPlain ? transport::ping_pong(state_->plain, state_->turn, bytes, rounds)
                              : transport::ping_pong(state_->fanfold, state_->turn, bytes, rounds);
}

double NetworkBench::stream(Wire wire, const Stream& stream) {
  state_->check(stream.bytes, stream.writes);
  if (stream.window < 2 || stream.window % 2 != 0 || stream.writes % (stream.window / 2) != 0) {
    throw BadArgument(
        "window", std::to_string(stream.window),
        "even, and half of it a divisor of the number of writes, " + std::to_string(stream.writes));
  }
  return wire == Wire::kPlain ? transport::stream(state_->plain, state_->turn, stream)
                              : transport::stream(state_->fanfold, state_->turn, stream);
}

}  // namespace fanfold::transport
