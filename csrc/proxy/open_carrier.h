// Opens a ProxyCarrier over the network that a setting names.
//
//     OpenCarrier carrier(memory, options);
//     carrier.start(addresses_of_all_ranks);  // exchanged by the caller
//     memory.carry(carrier.take());           // once all ranks have started theirs
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory/carrier.h"
#include "memory/symmetric.h"
#include "proxy/options.h"
#include "proxy/proxy_carrier.h"

namespace fanfold::proxy {

struct CarrierOptions {
  // "libfabric[:PROVIDER[:NICS]]", or "loopback[:SEED]" between ranks of one process: with a seed
  // it delays, reorders and repeats.
  std::string network;
  std::string interface;  // for networks over sockets, if `network` names no NIC; empty: any
  std::string world;      // the ranks of one process that meet in a loopback network
  bool one_host = false;  // all ranks are on this machine, which acts as several hosts
  int32_t threads = 4;
  double timeout_seconds = 100;
  bool give_up_peers = false;
  int64_t kernel_ring_slots = 0;  // of each thread's ring for a GPU's kernels; 0: none push
  bool gpu_memory = false;        // rows may have a GPU's memory, if the network reaches that
};

class OpenCarrier {
 public:
  // `memory` must outlive it. Throws BadArgument and Unavailable, and as Proxy does.
  OpenCarrier(const SymmetricMemory& memory, const CarrierOptions& options);

  // What was opened, such as "libfabric:tcp". Throws Misuse after `take` and `close`, as all do.
  std::string network() const;
  // As those of Proxy. The memory is a RowsLayout.
  void register_rows(RowsMemory rows);
  bool holds_rows() const { return carrier().holds_rows(); }
  bool has_rows_apart() const { return carrier().has_rows_apart(); }
  std::string why_no_gpu_memory() const { return carrier().why_no_gpu_memory(); }
  ProxyAddress address() const { return carrier().address(); }
  void start(const std::vector<ProxyAddress>& ranks) { carrier().start(ranks); }
  std::unique_ptr<Carrier> take();
  // Ends it at once, whatever is outstanding. Harmless when repeated, and after `take`.
  void close();

 private:
  ProxyCarrier& carrier() const;

  const SymmetricMemory& memory_;
  std::string network_;
  std::shared_ptr<void> meeting_;  // where ranks of one process find each other
  std::unique_ptr<ProxyCarrier> carrier_;
};

}  // namespace fanfold::proxy
