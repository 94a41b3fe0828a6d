// Ranks whose proxies meet in a loopback network, and the traffic between them.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/atomics.h"
#include "check.hpp"
#include "layout/command.h"
#include "layout/immediate.h"
#include "proxy/proxy.h"
#include "ranks.hpp"
#include "transport/loopback.h"

namespace fanfold {

namespace loopback = transport::loopback;

// A transport that counts what its user has in flight to each peer, acknowledgements left out.
class WatchedTransport final : public transport::Transport {
 public:
  struct InFlight {
    int32_t messages = 0;
    int64_t bytes = 0;
  };
  using Watch = std::map<int32_t, InFlight>;

  WatchedTransport(std::unique_ptr<transport::Transport> inner, int32_t ranks, Watch* most)
      : inner_(std::move(inner)), layout_(ImmediateLayout::of(ranks)), most_(most) {}

  std::string_view name() const override { return inner_->name(); }
  transport::Limits limits() const override { return inner_->limits(); }
  transport::Address address() const override { return inner_->address(); }
  transport::Code connect(int32_t peer, const transport::Address& address) override {
    return inner_->connect(peer, address);
  }
  transport::LocalMemory register_memory(std::byte* data, int64_t bytes) override {
    return inner_->register_memory(data, bytes);
  }
  transport::RemoteMemory remote(transport::LocalMemory memory) const override {
    return inner_->remote(memory);
  }
  transport::Code write(const transport::Write& write) override {
    const transport::Code code = inner_->write(write);
    const bool counted =
        layout_.decode(write.immediate).immediate.kind != ImmediateKind::kAcknowledgement;
    if (code != transport::Code::kOk || !counted) return code;
    sent_[write.context] = {write.peer, write.bytes};
    InFlight& now = now_[write.peer];
    InFlight& most = (*most_)[write.peer];
    most.messages = std::max(most.messages, ++now.messages);
    most.bytes = std::max(most.bytes, now.bytes += write.bytes);
    return code;
  }
  int32_t poll(std::span<transport::Event> events) override {
    const int32_t count = inner_->poll(events);
    for (int32_t i = 0; i < count; ++i) {
      const transport::Event& event = events[static_cast<size_t>(i)];
      if (event.kind != transport::EventKind::kCompletion) continue;
      const auto sent = sent_.find(event.context);
      if (sent == sent_.end()) continue;
      InFlight& now = now_[sent->second.first];
      --now.messages;
      now.bytes -= sent->second.second;
      sent_.erase(sent);
    }
    return count;
  }
  const std::string& error() const override { return inner_->error(); }

 private:
  std::unique_ptr<transport::Transport> inner_;
  ImmediateLayout layout_;
  Watch now_;
  Watch* most_;
  std::map<uint64_t, std::pair<int32_t, int64_t>> sent_;
};

// One rank: its memory, its counters and its proxy.
struct ProxyRank {
  std::vector<std::byte> storage;
  std::byte* memory = nullptr;  // aligned to rows
  std::vector<std::byte> rows;  // memory for rows alone, if there is any
  std::vector<uint64_t> counters;
  std::vector<WatchedTransport::Watch> watches;  // of each thread
  std::unique_ptr<proxy::Proxy> proxy;

  // What an offset of a write names.
  std::byte* at(int64_t offset) {
    return offset < kRowsApart ? memory + offset : rows.data() + (offset - kRowsApart);
  }
};

class ProxyWorld {
 public:
  // Ranks with `options` in a network of their own. `bytes` of memory for each, and `rows` of
  // memory for rows alone for the ranks below `with_rows`.
  ProxyWorld(const proxy::ProxyOptions& options, const loopback::Options& network, int64_t bytes,
             int64_t rows = 0, int32_t with_rows = std::numeric_limits<int32_t>::max())
      : network_(loopback::Network::create(network)), ranks_(static_cast<size_t>(options.ranks)) {
    std::vector<proxy::ProxyAddress> addresses;
    for (int32_t rank = 0; rank < options.ranks; ++rank) {
      ProxyRank& each = ranks_[static_cast<size_t>(rank)];
      each.storage.resize(static_cast<size_t>(bytes + kAreaAlignment));
      const auto address = reinterpret_cast<uintptr_t>(each.storage.data());
      each.memory = each.storage.data() + (kAreaAlignment - address % kAreaAlignment);
      each.counters.resize(static_cast<size_t>(options.ranks) * kCounters);
      each.watches.resize(static_cast<size_t>(options.threads));
      std::vector<std::unique_ptr<transport::Transport>> transports;
      transports.reserve(static_cast<size_t>(options.threads));
      for (int32_t thread = 0; thread < options.threads; ++thread) {
        transports.push_back(
            std::make_unique<WatchedTransport>(network_->open(rank, thread), options.ranks,
                                               &each.watches[static_cast<size_t>(thread)]));
      }
      proxy::ProxyOptions own = options;
      own.rank = rank;
      const proxy::ProxyMemory memory{
          .data = each.memory, .bytes = bytes, .counters = each.counters};
      each.proxy = std::make_unique<proxy::Proxy>(own, memory, std::move(transports));
      each.rows.resize(static_cast<size_t>(rows));
      if (rows > 0 && rank < with_rows) {
        each.proxy->register_rows({.data = each.rows.data(), .bytes = rows});
      }
      addresses.push_back(each.proxy->address());
    }
    for (const ProxyRank& each : ranks_) each.proxy->connect(addresses);
  }

  ProxyRank& operator[](int32_t rank) { return ranks_[static_cast<size_t>(rank)]; }
  proxy::Proxy& proxy(int32_t rank) { return *(*this)[rank].proxy; }
  int32_t ranks() const { return static_cast<int32_t>(ranks_.size()); }
  bool has_rows() const { return ranks_[0].proxy->has_rows_apart(); }
  loopback::Network& network() { return *network_; }

  // One step of one thread, at the network's time.
  bool step(int32_t rank, int32_t thread) {
    const proxy::ProxyThread::Time now{std::chrono::nanoseconds(network_->now())};
    return proxy(rank).thread(thread).step(now);
  }
  // One step of every thread of every rank.
  void step_all() {
    for (int32_t rank = 0; rank < ranks(); ++rank) {
      for (int32_t t = 0; t < proxy(rank).options().threads; ++t) step(rank, t);
    }
  }

  // What is in flight in the transport never exceeds the credit.
  void check_credit() {
    for (const ProxyRank& rank : ranks_) {
      const proxy::Credit& credit = rank.proxy->options().credit;
      for (const WatchedTransport::Watch& watch : rank.watches) {
        for (const auto& [peer, most] : watch) {
          CHECK(most.messages <= credit.messages);
          CHECK(most.bytes <= credit.bytes);
        }
      }
    }
  }

 private:
  std::shared_ptr<loopback::Network> network_;
  std::vector<ProxyRank> ranks_;
};

// Delivers in order, each write after the same time.
inline loopback::Options quiet_network() {
  loopback::Options network;
  network.poll_ns = 1000;
  network.delay = {.least = 5000, .most = 5000};
  return network;
}

inline void steps(ProxyWorld& world, int count) {
  for (int i = 0; i < count; ++i) world.step_all();
}

}  // namespace fanfold
