#include "proxy/proxy_carrier.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/wait.h"

namespace fanfold::proxy {
namespace {

// Peers that end at the same time are waited for no longer than this.
constexpr std::chrono::nanoseconds kLongestFinish = std::chrono::seconds(5);
// The last words of a rank that has failed take no longer.
constexpr std::chrono::nanoseconds kLongestFailedFinish = std::chrono::milliseconds(100);

// A rank looks so often, for a millisecond each, before it probes the next peer.
constexpr int32_t kLooksBetweenProbes = 50;

// Returns once a barrier or fence of all threads has ended, or after `longest`. In a barrier it
// probes one peer after the other: one that has died does not come, and no network reports that
// unasked.
void end_with(Proxy& proxy, CommandKind kind, std::chrono::nanoseconds longest) noexcept {
  try {
    const Tickets tickets = proxy.push_all(kind, longest);
    int32_t looks = 0;
    const auto ended = [&] {
      if (++looks % kLooksBetweenProbes == 0 && kind == CommandKind::kBarrier) {
        proxy.probe(looks / kLooksBetweenProbes % proxy.options().ranks);
      }
      return proxy.passed(tickets) || proxy.failure() != nullptr;
    };
    static_cast<void>(poll_until(ended, {.timeout = std::min(proxy.options().timeout, longest),
                                         .spin = std::chrono::nanoseconds(0),
                                         .idle = std::chrono::milliseconds(1)}));
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // The proxy has failed, or its ring stays full.
  }
}

}  // namespace

class ProxyCarrier::ProxyLink final : public Link {
 public:
  // Offsets of the modes' part count from `modes_offset` of a rank's memory.
  ProxyLink(Proxy& proxy, int32_t peer, int64_t modes_offset)
      : proxy_(proxy), peer_(peer), modes_offset_(modes_offset) {}

  void put(int64_t offset, int64_t bytes) override {
    for (int64_t done = 0; done < bytes; done += kLargestPut) {
      const int64_t place = modes_offset_ + offset + done;
      proxy_.push({.kind = CommandKind::kWrite,
                   .peer = peer_,
                   .bytes = std::min(bytes - done, kLargestPut),
                   .source = place,
                   .target = place});
    }
  }
  void store(int64_t offset, uint64_t word) override {
    proxy_.push({.kind = CommandKind::kStore,
                 .peer = peer_,
                 .target = modes_offset_ + offset,
                 .word = word});
  }
  void fence() override { proxy_.wait(proxy_.push_all(CommandKind::kFence)); }

 private:
  static constexpr int64_t kLargestPut = int64_t{1} << 30;

  Proxy& proxy_;
  int32_t peer_;
  int64_t modes_offset_;
};

ProxyCarrier::ProxyCarrier(const SymmetricMemory& memory, ProxyOptions options,
                           std::vector<std::unique_ptr<transport::Transport>> transports) {
  const CarriedMemory carried = memory.carried();
  options.rank = memory.rank();
  options.ranks = memory.ranks();
  counters_.resize(static_cast<size_t>(options.ranks) * kCounters);
  const ProxyMemory proxied{
      .data = carried.data,
      .bytes = carried.bytes,
      .sources = carried.copies,
      .store = [&memory, carried](int64_t offset,
                                  uint64_t word) { memory.receive(offset - carried.modes, word); },
      .counters = counters_,
      .bell = carried.bell,
  };
  proxy_ = std::make_unique<Proxy>(options, proxied, std::move(transports));
  links_.resize(static_cast<size_t>(options.ranks));
  for (int32_t peer = 0; peer < options.ranks; ++peer) {
    if (peer == options.rank) continue;
    links_[static_cast<size_t>(peer)] = std::make_unique<ProxyLink>(*proxy_, peer, carried.modes);
  }
}

ProxyCarrier::~ProxyCarrier() = default;

void ProxyCarrier::start(const std::vector<ProxyAddress>& ranks) {
  proxy_->connect(ranks);
  proxy_->start();
}

Link& ProxyCarrier::link(int32_t peer) { return *links_.at(static_cast<size_t>(peer)); }

std::vector<RingView> ProxyCarrier::kernel_rings() const {
  std::vector<RingView> rings;
  for (int32_t index = 0; index < proxy_->options().threads; ++index) {
    const Ring* ring = proxy_->thread(index).kernel_ring();
    if (ring != nullptr) rings.push_back(ring->view());
  }
  return rings;
}

std::vector<CarrierCount> ProxyCarrier::counts() const {
  std::vector<CarrierCount> counts;
  const auto add = [&](const Stats& stats, int32_t thread, int32_t peer) {
    for (const StatsField& each : kStatsFields) {
      if (each.of_peer != (peer >= 0)) continue;
      counts.push_back({each.name, thread, peer, stats.*each.field});
    }
  };
  for (int32_t index = 0; index < proxy_->options().threads; ++index) {
    const ProxyThread& thread = proxy_->thread(index);
    add(thread.stats(), index, -1);
    for (const int32_t peer : thread.peers()) {
      add(thread.stats_of(peer), index, peer);
      const bool lost = thread.failure() != nullptr || thread.lost(peer) != nullptr;
      counts.push_back({"lost", index, peer, uint64_t{lost}});
    }
  }
  return counts;
}

// Ranks come to a barrier, so that none takes away what another still writes to or waits for. A
// rank that closes alone, or whose peers have died, does not wait for ever.
void ProxyCarrier::finish(bool failed) noexcept {
  if (failed) {
    end_with(*proxy_, CommandKind::kFence, kLongestFailedFinish);
  } else {
    end_with(*proxy_, CommandKind::kBarrier, kLongestFinish);
  }
  proxy_->stop();
}

}  // namespace fanfold::proxy
