#include "proxy/measure_flow_control.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "layout/command.h"
#include "proxy/proxy.h"
#include "ring/command.h"

namespace fanfold::proxy {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 30;  // of all senders
constexpr int64_t kMostChunks = int64_t{1} << 20;
// Between two chunks at the receiver, so that no two travel as one message.
constexpr int64_t kGap = kRowAlignment;
// Of the model's time: no proxy gives a peer up.
constexpr std::chrono::hours kTimeout{1000};
// What a poll takes that finds nothing.
constexpr int64_t kPollNs = 1'000;

void check_between(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  throw BadArgument(name, std::to_string(value),
                    "from " + std::to_string(low) + " to " + std::to_string(high));
}

void check_incast(const IncastOptions& options) {
  check_between("senders", options.senders, 1, 255);
  check_between("bytes", options.bytes, 1, kMostBytes / options.senders);
  check_between("chunk_bytes", options.chunk_bytes, kRowAlignment, kMostBytes / options.senders);
  if (options.chunk_bytes % kRowAlignment != 0) {
    throw BadArgument("chunk_bytes", std::to_string(options.chunk_bytes),
                      "a multiple of " + std::to_string(kRowAlignment));
  }
  check_between("bytes / chunk_bytes", options.bytes / options.chunk_bytes, 0, kMostChunks);
  check_between("credit.bytes", options.credit.bytes, kRowAlignment, INT64_MAX);
  check_between("link.bytes_per_us", options.link.bytes_per_us, 1, INT64_MAX);
}

// Rank 0 receives, the others send.
class Model {
 public:
  explicit Model(const IncastOptions& options)
      : options_(options), chunks_((options.bytes + options.chunk_bytes - 1) / options.chunk_bytes),
        network_(transport::loopback::Network::create(network_of(options))) {
    const int32_t ranks = options.senders + 1;
    std::vector<ProxyAddress> addresses;
    counters_.resize(static_cast<size_t>(ranks),
                     std::vector<uint64_t>(static_cast<size_t>(ranks) * kCounters));
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const int64_t places = rank == 0 ? options.senders * chunks_ : 1;
      memory_.emplace_back(static_cast<size_t>(places * place_bytes()), content(rank));
      std::vector<std::unique_ptr<transport::Transport>> transports;
      transports.push_back(network_->open(rank));
      const ProxyMemory memory{.data = memory_.back().data(),
                               .bytes = static_cast<int64_t>(memory_.back().size()),
                               .counters = counters_[static_cast<size_t>(rank)]};
      proxies_.push_back(
          std::make_unique<Proxy>(proxy_options(rank), memory, std::move(transports)));
      producers_.push_back(std::make_unique<Producer>(proxies_.back()->ring_of(0)));
      addresses.push_back(proxies_.back()->address());
    }
    for (const auto& proxy : proxies_) proxy->connect(addresses);
    pushed_.resize(static_cast<size_t>(ranks));
  }

  Incast run() {
    while (!done()) {
      for (int32_t rank = 1; rank < ranks(); ++rank) push(rank);
      if (step_all()) continue;
      const int64_t next = network_->until_next();
      if (next < 0) throw Misuse("the modelled network stands still with messages in flight");
      network_->advance(std::min(next, kPollNs));
    }
    check_content();
    const transport::loopback::Counters counters = network_->counters();
    return {.bytes = options_.senders * chunks_ * options_.chunk_bytes,
            .ns = network_->now(),
            .messages = counters.writes,
            .packets = counters.packets,
            .dropped = counters.packets_dropped,
            .queued = counters.most_queued_bytes,
            .in_flight = in_flight_};
  }

 private:
  static transport::loopback::Options network_of(const IncastOptions& options) {
    transport::loopback::Options network;
    network.link = options.link;
    network.delay = {.least = options.delay_ns, .most = options.delay_ns};
    return network;
  }

  ProxyOptions proxy_options(int32_t rank) const {
    ProxyOptions proxy;
    proxy.rank = rank;
    proxy.ranks = options_.senders + 1;
    proxy.threads = 1;
    const int64_t whole = options_.credit.bytes / kRowAlignment * kRowAlignment;
    proxy.part_bytes = std::min(proxy.part_bytes, whole);
    proxy.message_bytes = std::clamp(whole, proxy.part_bytes, proxy.message_bytes);
    proxy.credit = options_.credit;
    proxy.timeout = kTimeout;
    return proxy;
  }

  // What a sender's memory is filled with. 0 is memory that nobody wrote.
  static std::byte content(int32_t rank) { return static_cast<std::byte>(rank); }

  int32_t ranks() const { return options_.senders + 1; }
  int64_t place_bytes() const { return options_.chunk_bytes + kGap; }
  int64_t place(int32_t rank, int64_t chunk) const {
    return ((rank - 1) * chunks_ + chunk) * place_bytes();
  }

  // As many chunks as the ring takes.
  void push(int32_t rank) {
    int64_t& pushed = pushed_[static_cast<size_t>(rank)];
    Producer& producer = *producers_[static_cast<size_t>(rank)];
    while (pushed < chunks_) {
      const Command command = make_command({.kind = CommandKind::kWrite,
                                            .peer = 0,
                                            .bytes = options_.chunk_bytes,
                                            .source = 0,
                                            .target = place(rank, pushed)});
      if (!producer.try_push(command)) return;
      ++pushed;
    }
  }

  bool step_all() {
    const ProxyThread::Time now{std::chrono::nanoseconds(network_->now())};
    bool worked = false;
    for (int32_t rank = 0; rank < ranks(); ++rank) {
      ProxyThread& thread = proxies_[static_cast<size_t>(rank)]->thread(0);
      worked = thread.step(now) || worked;
      proxies_[static_cast<size_t>(rank)]->check();
      if (rank > 0) in_flight_ = std::max(in_flight_, thread.channel(0)->out.bytes());
    }
    return worked;
  }

  bool done() const {
    for (int32_t rank = 1; rank < ranks(); ++rank) {
      const auto index = static_cast<size_t>(rank);
      if (pushed_[index] < chunks_ || proxies_[index]->thread(0).outstanding()) return false;
    }
    return true;
  }

  void check_content() const {
    const std::vector<std::byte>& received = memory_[0];
    for (int32_t rank = 1; rank < ranks(); ++rank) {
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        const auto first = received.begin() + place(rank, chunk);
        const bool same = std::all_of(first, first + options_.chunk_bytes,
                                      [rank](std::byte byte) { return byte == content(rank); });
        if (!same) throw Misuse("a chunk of rank " + std::to_string(rank) + " did not arrive");
      }
    }
  }

  IncastOptions options_;
  int64_t chunks_;  // of each sender
  std::shared_ptr<transport::loopback::Network> network_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<std::vector<uint64_t>> counters_;
  std::vector<std::unique_ptr<Proxy>> proxies_;
  std::vector<std::unique_ptr<Producer>> producers_;
  std::vector<int64_t> pushed_;
  int64_t in_flight_ = 0;
};

}  // namespace

Incast measure_incast(const IncastOptions& options) {
  check_incast(options);
  return Model(options).run();
}

}  // namespace fanfold::proxy
