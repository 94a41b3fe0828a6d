// Time, endpoints and memory of the loopback network.
#include "transport/loopback_state.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace fanfold::transport::loopback {
namespace {

constexpr int64_t kMostTime = int64_t{1} << 52;  // 52 days; a picosecond count of it fits 64 bits
constexpr int32_t kMostPlace = (1 << 20) - 1;    // of a rank and of a thread

constexpr uint64_t kMagic = 0x6b6361626c6f6f70;

// What `Transport::address` holds.
struct EndpointName {
  uint64_t magic;
  uint64_t network;  // addresses of another network of this process are refused
  uint64_t id;
};

}  // namespace

void State::at(int64_t time, std::function<void()> run) {
  steps_.push_back({std::min(time, kMostTime), order_++, std::move(run)});
  std::push_heap(steps_.begin(), steps_.end(), [](const Step& a, const Step& b) {
    return std::pair(a.time, a.order) > std::pair(b.time, b.order);
  });
}

void State::advance(int64_t ns) {
  const int64_t end = std::min(now_ + std::min(ns, kMostTime), kMostTime);
  while (!steps_.empty() && steps_.front().time <= end) {
    std::pop_heap(steps_.begin(), steps_.end(), [](const Step& a, const Step& b) {
      return std::pair(a.time, a.order) > std::pair(b.time, b.order);
    });
    const Step step = std::move(steps_.back());
    steps_.pop_back();
    now_ = std::max(now_, step.time);
    step.run();
  }
  now_ = end;
}

size_t State::open(int32_t rank, int32_t thread) {
  const auto check = [](const char* name, int32_t value) {
    if (value >= 0 && value <= kMostPlace) return;
    throw BadArgument(name, std::to_string(value), "between 0 and " + std::to_string(kMostPlace));
  };
  check("rank", rank);
  check("thread", thread);
  for (const auto& endpoint : endpoints_) {
    if (!endpoint->open || endpoint->rank != rank || endpoint->thread != thread) continue;
    throw BadArgument("thread", std::to_string(thread) + " of rank " + std::to_string(rank),
                      "one that has no open transport");
  }
  auto endpoint = std::make_unique<Endpoint>();
  endpoint->rank = rank;
  endpoint->thread = thread;
  endpoint->rails.resize(static_cast<size_t>(options.rails));
  endpoints_.push_back(std::move(endpoint));
  return endpoints_.size() - 1;
}

void State::close(size_t id) {
  Endpoint& endpoint = *endpoints_[id];
  if (!endpoint.open) return;
  for (Rail& rail : endpoint.rails) {
    for (const auto* const queue : {&rail.inbound, &rail.waiting}) {
      for (const Inbound& inbound : *queue) {
        if (!inbound.message->landed) lose(inbound.message, "the peer has gone");
      }
    }
    rail.inbound.clear();
    rail.waiting.clear();
  }
  endpoint.completions.clear();
  endpoint.open = false;
}

Code State::connect(size_t id, int32_t peer, const Address& address, std::string& error) {
  Endpoint& endpoint = *endpoints_[id];
  if (!endpoint.failure.empty()) {
    error = endpoint.failure;
    return Code::kFailed;
  }
  EndpointName name{};
  if (address.size() == sizeof(name)) std::memcpy(&name, address.data(), sizeof(name));
  const auto rails = static_cast<size_t>(options.rails);
  if (peer < 0) {
    error = "peer is " + std::to_string(peer) + ", but must be at least 0";
  } else if (address.size() != sizeof(name)) {
    error = "the address of peer " + std::to_string(peer) + " has " +
            std::to_string(address.size()) + " bytes instead of " + std::to_string(sizeof(name));
  } else if (name.magic != kMagic || name.network != reinterpret_cast<uintptr_t>(this) ||
             name.id >= endpoints_.size()) {
    error = "the address of peer " + std::to_string(peer) + " is none of this network";
  } else if (!endpoint.channels
                  .try_emplace(peer, Channel{.target = name.id,
                                             .in_flight = std::vector<int32_t>(rails),
                                             .last_arrival = std::vector<int64_t>(rails),
                                             .failure = {}})
                  .second) {
    error = "peer " + std::to_string(peer) + " is connected already";
  } else {
    return Code::kOk;
  }
  endpoint.failure = error;
  return Code::kFailed;
}

LocalMemory State::register_memory(size_t id, std::byte* data, int64_t bytes, std::string& error) {
  Endpoint& endpoint = *endpoints_[id];
  if (data == nullptr || bytes <= 0) {
    error = "memory of " + std::to_string(bytes) + " bytes" + (data == nullptr ? " at null" : "") +
            " cannot be registered";
    return {};
  }
  // Differs from all keys of this network, and is never 0.
  const uint64_t key = (uint64_t{id + 1} << 32) + endpoint.memories.size();
  endpoint.memories.push_back({data, bytes, key});
  return {static_cast<int32_t>(endpoint.memories.size() - 1)};
}

RemoteMemory State::remote(size_t id, LocalMemory memory) const {
  const Endpoint& endpoint = *endpoints_[id];
  if (memory.index < 0 || static_cast<size_t>(memory.index) >= endpoint.memories.size()) return {};
  const Memory& registered = endpoint.memories[static_cast<size_t>(memory.index)];
  return {.base = reinterpret_cast<uintptr_t>(registered.data),
          .key = registered.key,
          .bytes = registered.bytes};
}

Address State::address(size_t id) const {
  const EndpointName name{.magic = kMagic, .network = reinterpret_cast<uintptr_t>(this), .id = id};
  Address address(sizeof(name));
  std::memcpy(address.data(), &name, sizeof(name));
  return address;
}

}  // namespace fanfold::transport::loopback
