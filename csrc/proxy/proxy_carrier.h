// Carries the writes of a rank's symmetric memory to other hosts through a Proxy.
//
// Every put is a write command and every stored word a store command, in the ring of the peer's
// thread. A rank's copy of a peer's memory is laid out as that memory, so both offsets of a write
// are the same.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "memory/carrier.h"
#include "memory/symmetric.h"
#include "proxy/proxy.h"

namespace fanfold::proxy {

class ProxyCarrier final : public Carrier {
 public:
  // `options.rank` and `options.ranks` are those of the memory, which must own the carrier, or
  // outlive it. One transport for each thread. Throws as Proxy does.
  ProxyCarrier(const SymmetricMemory& memory, ProxyOptions options,
               std::vector<std::unique_ptr<transport::Transport>> transports);
  ~ProxyCarrier() override;

  // As those of Proxy.
  void register_rows(const RowsMemory& rows) { proxy_->register_rows(rows); }
  bool holds_rows() const { return proxy_->holds_rows(); }
  bool has_rows_apart() const { return proxy_->has_rows_apart(); }
  std::string why_no_gpu_memory() const { return proxy_->why_no_gpu_memory(); }
  ProxyAddress address() const { return proxy_->address(); }
  // Connects to the ranks, whose addresses are in rank order, and starts the threads.
  void start(const std::vector<ProxyAddress>& ranks);

  Link& link(int32_t peer) override;
  std::vector<RingView> kernel_rings() const override;
  void begin_wait() override { proxy_->begin_busy(); }
  void end_wait() override { proxy_->end_busy(); }
  void check(int32_t peer) const override { proxy_->check(peer); }
  bool lost(int32_t peer) const override { return proxy_->lost(peer); }
  bool ended(int32_t peer) const override { return proxy_->ended(peer); }
  void probe(int32_t peer) override { proxy_->probe(peer); }
  // The fields of Stats, and "lost" for each peer.
  std::vector<CarrierCount> counts() const override;
  std::string path(int32_t peer) const override { return proxy_->path(peer); }
  void finish(bool failed) noexcept override;

  const Proxy& proxy() const { return *proxy_; }

 private:
  class ProxyLink;

  std::vector<uint64_t> counters_;  // no command of this carrier's waits for one
  std::unique_ptr<Proxy> proxy_;
  std::vector<std::unique_ptr<ProxyLink>> links_;  // null for this rank
};

}  // namespace fanfold::proxy
