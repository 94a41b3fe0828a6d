// Symmetric memory of ranks: every rank owns one region of the same layout and maps the regions of
// its peers on this host. Of a peer on another host it has a copy of what it writes there, which a
// Link carries over.
//
// It also provides bounded waits for signals that name the peer when they time out, refusals, and a
// mask of peers that waits skip. Ranks write to each other through Peer alone.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/atomics.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/wait.h"
#include "layout/control.h"
#include "layout/signal.h"
#include "memory/carrier.h"
#include "memory/hosts.h"
#include "memory/peer.h"
#include "memory/pending_wait.h"
#include "memory/region.h"
#include "memory/row_counts.h"
#include "memory/wait_counts.h"

namespace fanfold {

struct SymmetricOptions {
  int32_t rank;
  int32_t ranks;
  int64_t bytes;  // of the modes' part, per rank; without the control block
  double timeout_seconds;
  double spin_seconds;
  bool mask_late_peers;  // mask a peer whose wait times out, instead of throwing PeerTimeout
  // The host of each rank; empty if all ranks are on one.
  // NOLINTNEXTLINE(readability-redundant-member-init): GCC wants it where initializers are named
  std::vector<int32_t> hosts{};
};

struct PeerAddress {
  pid_t pid;
  int descriptor;
  pid_t thread = 0;  // the thread that made the memory; a peer in the same process watches it
};

// The memory of a rank that a Carrier writes from and to.
struct CarriedMemory {
  std::byte* data;
  int64_t bytes;
  int64_t modes;  // where the modes' part begins in the memory of any rank
  // Where in `data` the copy of each peer's memory begins; 0 of ranks on this host.
  std::vector<int64_t> copies;
  Doorbell* bell;  // of this rank
};

const char* name_of(Phase phase);

class SymmetricMemory {
 public:
  explicit SymmetricMemory(const SymmetricOptions& options);
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  // Makes all `options.ranks` ranks in this process, for one thread each. They share one mapping of
  // each region, so that tools that identify memory by its address (sanitizers) see all accesses.
  static std::vector<std::unique_ptr<SymmetricMemory>> in_process(SymmetricOptions options);

  // The address through which this rank's peers map its region.
  PeerAddress address() const;
  // Has `link` carry what is written to `peer`, which is on another host. Precedes the first write
  // to the peer. The link must stay valid while this rank writes, and nothing may be received for
  // this rank any more once it closes the memory.
  void link(int32_t peer, Link& link);
  // The same for all peers on other hosts, by the links of `carrier`. Keeps it until it is closed.
  void carry(std::unique_ptr<Carrier> carrier);
  CarriedMemory carried() const;
  // Maps the regions of the ranks on this host. `peers` are in rank order; those of other hosts are
  // not used.
  void map(const std::vector<PeerAddress>& peers);
  // Stores a word that the link of a peer has carried, and wakes the ranks of this host, which may
  // all wait for it. Any thread may call it.
  void receive(int64_t offset, uint64_t value) const;
  // Closes this rank's descriptor. Must follow `map` on all ranks; afterwards only the mappings
  // keep the memory alive.
  void seal() { regions_.at(index(rank())).close_descriptor(); }
  // Waits a while for what a carrier still has to deliver, unless a call has failed.
  void close();

  const Hosts& hosts() const { return hosts_; }
  int32_t rank() const { return options_.rank; }
  int32_t ranks() const { return options_.ranks; }
  int64_t bytes() const { return options_.bytes; }
  int64_t mapped_bytes() const { return layout_.bytes() + options_.bytes; }

  // Writes to the modes' part of `rank`'s region. This rank is a peer of its own, too.
  const Peer& peer(int32_t rank) const { return peers_[index(rank)]; }
  // The modes' part of this rank's own region.
  std::byte* own() const { return base(rank()); }
  // The modes' part of `peer`'s region, to read what the peer itself writes there.
  std::byte* base(int32_t peer) const { return regions_[index(peer)].data() + layout_.bytes(); }
  // The address of `bytes` bytes at `offset` of that part, for callers outside of the core. Throws
  // Misuse if this memory is closed, and BadArgument for a range outside of the part.
  std::byte* window(int32_t peer, int64_t offset, int64_t bytes) const;

  // Loads the signal at `offset` of this rank's own part, or of that of a rank on this host.
  Signal peek(int64_t offset) const { return peek(rank(), offset); }
  Signal peek(int32_t owner, int64_t offset) const;

  // Waits for the signal. Returns false if the peer is masked already or this wait masks it.
  // `actual()` returns the epoch that has arrived, for PeerTimeout. Throws PeerTimeout, and
  // BadArgument if ranks in different calls wait for each other.
  bool wait(const AwaitedSignal& awaited, const std::function<int64_t()>& actual);

  // Waits, in `phase`, until `ready()` returns true. If the wait times out, throws PeerTimeout with
  // `report()`, or masks `report().peer` and returns false. Throws if that is this rank or masked
  // already: ranks that have masked different peers may wait for each other. A long wait calls
  // `report()` every `WaitPolicy::idle` and ends early if the process of `report().peer` has ended.
  bool wait_until(Phase phase, const std::function<bool()>& ready,
                  const std::function<TimeoutReport()>& report) {
    return wait_for(phase, ready, report, nullptr);
  }

  // Waits, in `phase`, until `ready()` returns true, for what no peer sends: another thread of this
  // process stores it. Returns false if the time is over. Then, and if the wait is interrupted in
  // the middle of its call, no further call is possible.
  bool poll(Phase phase, const std::function<bool()>& ready);

  // Stores the reason of a refusal. Call it before pushing signals of value kRefusedValue.
  void set_reason(Phase phase, uint32_t epoch, const std::string& reason) const;
  RefusalReport refusal(int32_t peer, Phase phase, uint32_t epoch) const;

  void barrier();

  // The rank that receives for `peer` what this rank sends to its whole host: `peer` on this host.
  int32_t gateway_to(int32_t peer) const {
    return hosts_.together(peer, rank()) ? peer : hosts_.gateway(rank(), hosts_.host_of(peer));
  }

  bool masked(int32_t peer) const { return load_relaxed_system(&masked_[index(peer)]) != 0; }
  void set_masked(int32_t peer, bool value) {
    store_relaxed_system(&masked_[index(peer)], uint8_t{value});
  }

  // The peers that waits of this rank have masked so far, in order. `phase` includes the number of
  // the call if the wait was for a signal.
  const std::vector<TimeoutReport>& late() const { return late_; }

  // For any thread, also after `close`: how the waits of this rank went, and what the carrier has
  // counted.
  std::vector<WaitCount> waits() const { return waits_.all(); }
  // The rows of the modes' calls, which they count.
  RowCounts& rows() { return rows_; }
  const RowCounts& rows() const { return rows_; }
  std::vector<CarrierCount> carrier_counts() const;
  // Why the carrier has lost `peer`, in words for a user; empty if it has not, or if there is none.
  std::string why_lost(int32_t peer) const;
  // The carrier, for whoever sends through it without this class. Throws Misuse if there is none.
  Carrier& carrier() const;

  // Throws Misuse if this memory is closed, in a forked child, and after a failed wait. After a
  // failed wait the ranks are out of step, so further calls could deliver wrong data.
  void check_usable() const;

 private:
  static size_t index(int32_t peer) { return static_cast<size_t>(peer); }
  ControlBlock& control(int32_t peer) const {
    return *reinterpret_cast<ControlBlock*>(regions_[index(peer)].data());
  }
  uint64_t* word(int32_t peer, int64_t offset) const {
    return reinterpret_cast<uint64_t*>(base(peer) + offset);
  }
  void make_peer(int32_t peer);
  int64_t copy_offset(int32_t peer) const;
  int64_t copied_reason(int32_t peer, Phase phase, uint32_t epoch) const;
  // `awaited` is the awaited signal if the wait is for a single one, else null.
  bool wait_for(Phase phase, const std::function<bool()>& ready,
                const std::function<TimeoutReport()>& report, const AwaitedSignal* awaited);
  // Ends the carrier, if there is one, and keeps what it has counted.
  void end_carrier();
  PendingView pending_view() const;
  std::chrono::nanoseconds probe_interval() const;
  // Whether `peer`, for which `wait` waits, has ended. Asks its host from the time `probe_at` on,
  // which it moves on. Throws TransportError and PeerTimeout as a carrier's check does.
  bool has_ended(int32_t peer, const CountedWait& wait, std::chrono::nanoseconds& probe_at) const;
  [[noreturn]] void end_late(TimeoutReport late);
  [[noreturn]] void end_deadlocked(const AwaitedSignal& awaited,
                                   const std::vector<BlockedRank>& chain);

  SymmetricOptions options_;
  Hosts hosts_;
  ControlLayout layout_;
  std::vector<Region> regions_;
  std::vector<Peer> peers_;
  std::vector<RankHandle> handles_;
  std::vector<uint8_t> masked_;
  WaitCounts waits_;
  RowCounts rows_;
  std::unique_ptr<Carrier> carrier_;  // writes to the regions, so that it ends before them
  // Held while `carrier_` changes and while another thread reads its numbers.
  mutable std::mutex carrier_mutex_;
  std::vector<CarrierCount> last_counts_;  // of a carrier that has ended
  uint32_t generation_ = fork_generation();
  uint32_t barrier_epoch_ = 0;
  std::vector<TimeoutReport> late_;
  std::string failure_;
  bool closed_ = false;
};

}  // namespace fanfold
