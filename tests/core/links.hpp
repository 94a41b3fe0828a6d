// Ranks of one process as ranks of several hosts: links that carry writes late and out of order, as
// networks do, or proxies that meet in a loopback network.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "memory/symmetric.h"
#include "proxy/proxy_carrier.h"
#include "ranks.hpp"
#include "transport/loopback.h"

namespace fanfold {

// Carries what one rank writes to another. A thread of its own copies each put at any time before
// the next store, in any order.
class SlowLink : public Link {
 public:
  SlowLink(SymmetricMemory& from, SymmetricMemory& to, uint64_t seed)
      : from_(from), to_(to), random_(seed), carrier_([this] { carry(); }) {}
  ~SlowLink() override {
    {
      const std::scoped_lock lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    carrier_.join();
  }

  void put(int64_t offset, int64_t bytes) override {
    if (offset % kRowAlignment != 0 || bytes % kRowAlignment != 0 || bytes <= 0) {
      throw Misuse("a put of " + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
                   " is empty or not aligned");
    }
    add({offset, bytes, 0});
  }
  void store(int64_t offset, uint64_t word) override { add({offset, 0, word}); }
  void fence() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return writes_.empty() && !carrying_; });
    ++fences_;
  }
  int32_t fences() const { return fences_; }

 private:
  struct Write {
    int64_t offset;
    int64_t bytes;  // 0: a store of `word`
    uint64_t word;
  };

  void add(Write write) {
    {
      const std::scoped_lock lock(mutex_);
      writes_.push_back(write);
    }
    changed_.notify_all();
  }

  void carry() {
    for (std::vector<Write> taken = take(); !taken.empty(); taken = take()) deliver(taken);
  }

  // Waits for writes; returns none once the link is closed.
  std::vector<Write> take() {
    std::unique_lock lock(mutex_);
    carrying_ = false;
    changed_.notify_all();
    changed_.wait(lock, [this] { return closed_ || !writes_.empty(); });
    carrying_ = true;
    return std::exchange(writes_, {});
  }

  // Shuffles the puts between two stores.
  void deliver(std::vector<Write>& writes) {
    for (size_t begin = 0; begin < writes.size();) {
      size_t end = begin;
      while (end < writes.size() && writes[end].bytes != 0) ++end;
      for (size_t i = end; i > begin + 1; --i) {
        const auto other = begin + static_cast<size_t>(random_.next() % (i - begin));
        std::swap(writes[i - 1], writes[other]);
      }
      for (size_t i = begin; i < end; ++i) copy(writes[i]);
      if (random_.one_in(4)) std::this_thread::yield();
      if (end < writes.size()) to_.receive(writes[end].offset, writes[end].word);
      begin = end + 1;
    }
  }

  void copy(const Write& write) const {
    std::memcpy(to_.own() + write.offset, from_.base(to_.rank()) + write.offset,
                static_cast<size_t>(write.bytes));
  }

  SymmetricMemory& from_;
  SymmetricMemory& to_;
  Random random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Write> writes_;
  std::atomic<int32_t> fences_ = 0;
  bool carrying_ = false;
  bool closed_ = false;
  std::thread carrier_;
};

using Links = std::vector<std::unique_ptr<SlowLink>>;

enum class Between { kSlowLinks, kProxies };

// On how many hosts the ranks of a test are, if there are as many ranks; otherwise fewer.
inline int32_t hosts_of_worlds = 1;
// What is between these hosts.
inline Between between_hosts = Between::kSlowLinks;

// Sets both as long as it exists.
struct HostsOfWorlds {
  explicit HostsOfWorlds(int32_t hosts, Between between = Between::kSlowLinks) {
    hosts_of_worlds = hosts;
    between_hosts = between;
  }
  ~HostsOfWorlds() {
    hosts_of_worlds = 1;
    between_hosts = Between::kSlowLinks;
  }
  HostsOfWorlds(const HostsOfWorlds&) = delete;
  HostsOfWorlds& operator=(const HostsOfWorlds&) = delete;
};

// `ranks` ranks in order on at most `hosts` hosts.
inline std::vector<int32_t> hosts_for(int32_t ranks, int32_t hosts) {
  std::vector<int32_t> host;
  host.reserve(static_cast<size_t>(ranks));
  for (int32_t rank = 0; rank < ranks; ++rank) {
    host.push_back(rank * std::min(hosts, ranks) / ranks);
  }
  return host;
}

// Ranks carry what they write to other hosts through proxies, over a network that does all that the
// contract of transports allows.
inline void connect_proxies(const Group& group) {
  static std::atomic<uint64_t> worlds = 0;
  const uint64_t seed = worlds++;
  transport::loopback::Options network = transport::loopback::Options::hostile(seed);
  network.poll_ns = 1000;
  const auto connected = transport::loopback::Network::create(network);
  proxy::ProxyOptions options;
  options.threads = 1 + static_cast<int32_t>(seed % 2);
  options.ring_slots = 64;
  options.part_bytes = 4096;
  options.message_bytes = 16384;
  options.first_sequence = uint64_t{0} - 20;
  options.give_up_peers = true;
  options.timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(kLongTimeoutSeconds));
  std::vector<std::unique_ptr<proxy::ProxyCarrier>> carriers;
  std::vector<proxy::ProxyAddress> addresses;
  for (const auto& memory : group) {
    std::vector<std::unique_ptr<transport::Transport>> transports;
    transports.reserve(static_cast<size_t>(options.threads));
    for (int32_t thread = 0; thread < options.threads; ++thread) {
      transports.push_back(connected->open(memory->rank(), thread));
    }
    carriers.push_back(
        std::make_unique<proxy::ProxyCarrier>(*memory, options, std::move(transports)));
    addresses.push_back(carriers.back()->address());
  }
  for (const auto& carrier : carriers) carrier->start(addresses);
  for (size_t rank = 0; rank < group.size(); ++rank) group[rank]->carry(std::move(carriers[rank]));
}

// Separates the ranks of `group` that are on different hosts, though they share their memory. The
// links must end before the group does.
inline Links separate(const Group& group) {
  Links links;
  if (between_hosts == Between::kProxies) {
    if (!group.empty() && group[0]->hosts().several()) connect_proxies(group);
    return links;
  }
  for (const auto& from : group) {
    for (const auto& to : group) {
      if (from->hosts().together(from->rank(), to->rank())) continue;
      links.push_back(std::make_unique<SlowLink>(*from, *to, links.size()));
      from->link(to->rank(), *links.back());
    }
  }
  return links;
}

}  // namespace fanfold
