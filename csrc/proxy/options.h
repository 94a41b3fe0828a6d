// The settings of a proxy, and what ranks exchange before they connect.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/array.h"
#include "layout/control.h"
#include "proxy/window.h"
#include "transport/transport.h"

namespace fanfold::proxy {

struct ProxyOptions {
  int32_t rank = 0;
  int32_t ranks = 1;          // 1 to kMostProxyRanks
  int32_t threads = 4;        // 1 to 64
  int64_t ring_slots = 1024;  // of each thread's ring
  // Of one more ring for each thread, into which the kernels of a GPU push; 0: there is none.
  int64_t kernel_ring_slots = 0;
  // The largest piece of a command that counts as one. A multiple of 16, the same on all ranks.
  int64_t part_bytes = int64_t{256} << 10;
  int64_t message_bytes = int64_t{1} << 20;  // the largest message; at least part_bytes
  // What this rank grants to each peer.
  Credit credit{.messages = kMostInFlight, .bytes = int64_t{16} << 20};
  std::chrono::nanoseconds timeout = std::chrono::seconds(100);
  // A peer that is late or lost is given up, with what is outstanding for it, and the proxy goes
  // on; otherwise the proxy fails. A peer that is known to have ended is given up in any case.
  bool give_up_peers = false;
  // 1 ms at most. A thread that has been idle for long sleeps four times as long.
  std::chrono::nanoseconds idle_sleep = std::chrono::milliseconds(1);
  // A thread polls without sleeping until so long after its last work: kernels wake nobody.
  std::chrono::nanoseconds awake{0};
  // Thread t runs on cores[t % size]; empty: on those near its NIC.
  std::vector<int32_t> cores;
  uint64_t first_sequence = 0;  // of every channel; the same on all ranks
};

// Throws BadArgument if a setting is out of bounds.
void check_options(const ProxyOptions& options);

// Memory for rows alone, apart from what else a rank sends and receives: offsets of commands from
// kRowsApart on are those of this memory, and no others are so large.
struct RowsMemory {
  std::byte* data = nullptr;
  int64_t bytes = 0;
  // NOLINTNEXTLINE(readability-redundant-member-init): GCC wants it where initializers are named
  std::vector<int64_t> sources = {};  // as those of ProxyMemory
  int32_t device = -1;                // CUDA's number of its GPU; -1: it is the CPU's
  int dmabuf = -1;                    // of a GPU's: a descriptor of its pages; -1: there is none
};

// What the proxy reads and writes of its rank. The caller keeps it mapped while the proxy exists.
struct ProxyMemory {
  std::byte* data;  // registered for writes from it and to it
  int64_t bytes;
  // Where in `data` the sources of the writes to each peer count from; empty: from its start.
  // NOLINTNEXTLINE(readability-redundant-member-init): GCC wants it where initializers are named
  std::vector<int64_t> sources = {};
  // Executes a peer's store at an offset of `data`; empty: by a release store.
  // NOLINTNEXTLINE(readability-redundant-member-init): see `sources`
  std::function<void(int64_t offset, uint64_t word)> store = {};
  // [ranks][kCounters]: what has arrived from each source. The proxy sets all to 0; later only the
  // thread of that source writes them.
  Array<uint64_t> counters;
  // Rung after counters have grown and after a failure; null if nobody sleeps on it.
  Doorbell* bell = nullptr;
};

// What a peer needs in order to write to one thread of this rank.
struct ThreadAddress {
  transport::Address address;
  transport::RemoteMemory memory;
  transport::RemoteMemory inbox;      // [sources of this thread][kMostInFlight] of StoredWord
  transport::RemoteMemory rows = {};  // of a RowsMemory, if there is one
};

// What a peer needs in order to write to this rank.
struct ProxyAddress {
  int32_t ranks;
  int64_t part_bytes;
  uint64_t first_sequence;
  Credit credit;  // granted to each peer
  std::vector<ThreadAddress> threads;
};

}  // namespace fanfold::proxy
