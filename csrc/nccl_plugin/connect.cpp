#include "nccl_plugin/connect.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace fanfold::nccl_plugin {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPollMs = 50;

// The handshake of one rank with all others.
class Handshake {
 public:
  Handshake(const Listener& listener, std::span<const Address> addresses, int32_t rank,
            std::vector<std::unique_ptr<Link>>& links)
      : listener_(listener), addresses_(addresses), rank_(rank), links_(links) {}

  Problem run() {
    const auto deadline = Clock::now() + std::chrono::milliseconds(listener_.settings.timeout_ms);
    links_.clear();
    links_.resize(addresses_.size());
    sockets_.resize(addresses_.size());
    connected_.assign(addresses_.size(), false);
    connected_[static_cast<size_t>(rank_)] = true;
    for (auto peer = static_cast<size_t>(rank_) + 1; peer < addresses_.size(); ++peer) {
      Problem problem = begin_connect(addresses_[peer], sockets_[peer]);
      if (!problem.empty()) return problem;
    }
    while (std::ranges::find(connected_, false) != connected_.end()) {
      if (Clock::now() > deadline) return late();
      Problem problem = step();
      if (!problem.empty()) return problem;
    }
    return {};
  }

 private:
  struct Incoming {
    Socket socket;
    std::byte hello[sizeof(Hello)] = {};
    size_t got = 0;
  };

  Problem step() {
    std::vector<pollfd> waits = {
        {.fd = listener_.socket.descriptor(), .events = POLLIN, .revents = 0}};
    for (size_t peer = 0; peer < sockets_.size(); ++peer) {
      if (connected_[peer] || !sockets_[peer].is_open()) continue;
      waits.push_back({.fd = sockets_[peer].descriptor(), .events = POLLOUT, .revents = 0});
    }
    for (const Incoming& incoming : incoming_) {
      waits.push_back({.fd = incoming.socket.descriptor(), .events = POLLIN, .revents = 0});
    }
    poll(waits.data(), waits.size(), kPollMs);
    for (size_t peer = static_cast<size_t>(rank_) + 1; peer < sockets_.size(); ++peer) {
      Problem problem = connected_[peer] ? Problem() : greet(peer);
      if (!problem.empty()) return problem;
    }
    for (Socket fresh = accept_one(listener_.socket); fresh.is_open();
         fresh = accept_one(listener_.socket)) {
      incoming_.emplace_back().socket = std::move(fresh);
    }
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
      return system_problem("accepting a rank's connection", errno);
    }
    Problem problem;
    std::erase_if(incoming_, [&](Incoming& incoming) {
      bool stays = true;
      if (problem.empty()) problem = admit(incoming, stays);
      return !stays;
    });
    return problem;
  }

  Problem greet(size_t peer) {
    pollfd writable{.fd = sockets_[peer].descriptor(), .events = POLLOUT, .revents = 0};
    if (poll(&writable, 1, 0) != 1) return {};
    Problem problem = finish_connect(addresses_[peer], sockets_[peer]);
    if (!problem.empty()) return problem;
    make_reliable(sockets_[peer], listener_.settings.timeout_ms);
    Hello hello{.nonce = addresses_[peer].nonce, .rank = rank_};
    RingMemory memory;
    const uint64_t host = listener_.address.host;
    if (host != 0 && host == addresses_[peer].host) {
      problem = memory.create(addresses_[peer].nonce);
      if (!problem.empty()) return problem;
      hello.pid = getpid();
      hello.rings = memory.descriptor();
    }
    size_t sent = 0;
    // The first bytes of a fresh connection find room.
    const auto state =
        sockets_[peer].send(reinterpret_cast<const std::byte*>(&hello), sizeof hello, sent);
    if (state != Socket::State::kOpen || sent != sizeof hello) {
      return system_problem("the first send to " + addresses_[peer].text(), errno);
    }
    links_[peer] = link(std::move(sockets_[peer]), std::move(memory), 0);
    connected_[peer] = true;
    return {};
  }

  static std::unique_ptr<Link> link(Socket socket, RingMemory memory, int side) {
    if (memory.rings() == nullptr) return std::make_unique<Link>(std::move(socket));
    return shared_link(std::move(socket), std::move(memory), side);
  }

  // Sets `stays` if its hello is not complete. A connection of another program is closed: its hello
  // lacks the nonce.
  Problem admit(Incoming& incoming, bool& stays) {
    const auto state = incoming.socket.receive(incoming.hello + incoming.got,
                                               sizeof(Hello) - incoming.got, incoming.got);
    stays = state == Socket::State::kOpen && incoming.got < sizeof(Hello);
    if (stays || state != Socket::State::kOpen) return {};
    Hello hello;
    std::memcpy(&hello, incoming.hello, sizeof hello);
    const bool known = hello.magic == Address::kMagic && hello.nonce == listener_.address.nonce &&
                       hello.rank >= 0 && hello.rank < rank_ &&
                       !connected_[static_cast<size_t>(hello.rank)];
    if (!known) return {};
    RingMemory memory;
    if (hello.rings >= 0) {
      Problem problem = memory.open(hello.pid, static_cast<int>(hello.rings), hello.nonce);
      if (!problem.empty()) return problem;
    }
    const auto peer = static_cast<size_t>(hello.rank);
    make_reliable(incoming.socket, listener_.settings.timeout_ms);
    links_[peer] = link(std::move(incoming.socket), std::move(memory), 1);
    connected_[peer] = true;
    return {};
  }

  Problem late() const {
    std::string missing;
    for (size_t peer = 0; peer < connected_.size(); ++peer) {
      if (connected_[peer]) continue;
      missing += (missing.empty() ? "" : ", ") + std::to_string(peer) + " (" +
                 addresses_[peer].text() + ")";
    }
    return "rank " + std::to_string(rank_) + " of " + std::to_string(addresses_.size()) + " at " +
           listener_.address.text() + " has waited " +
           std::to_string(listener_.settings.timeout_ms) + " ms for ranks " + missing +
           "; they may have failed, or a firewall may block the interface: set interface= or "
           "timeout_ms= in FANFOLD_NCCL_PLUGIN";
  }

  const Listener& listener_;
  std::span<const Address> addresses_;
  const int32_t rank_;
  std::vector<std::unique_ptr<Link>>& links_;
  std::vector<Socket> sockets_;  // that connect
  std::vector<bool> connected_;
  std::vector<Incoming> incoming_;
};

}  // namespace

Problem connect_all(const Listener& listener, std::span<const Address> addresses, int32_t rank,
                    std::vector<std::unique_ptr<Link>>& links) {
  return Handshake(listener, addresses, rank, links).run();
}

}  // namespace fanfold::nccl_plugin
