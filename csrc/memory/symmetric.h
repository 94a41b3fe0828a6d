// Symmetric memory of the ranks of one host: every rank owns one region of the same layout and has
// all regions of its peers mapped.
//
// On top of the plain memory it offers what every protocol needs: signals between ranks, waits for
// them that are bounded and name the peer, refusals, and a mask of peers to go on without.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "base/wait.h"
#include "layout/control.h"
#include "layout/signal.h"
#include "memory/pending_wait.h"
#include "memory/region.h"

namespace fanfold {

struct SymmetricOptions {
  int32_t rank;
  int32_t ranks;
  int64_t bytes;  // what the modes may place, per rank; the control block comes on top
  double timeout_seconds;
  double spin_seconds;
  bool mask_late_peers;  // go on without a peer that is late, instead of throwing PeerTimeout
};

struct PeerAddress {
  pid_t pid;
  int descriptor;
  pid_t thread = 0;  // that made the memory; a peer of the same process watches it
};

const char* name_of(Phase phase);

class SymmetricMemory {
 public:
  explicit SymmetricMemory(const SymmetricOptions& options);
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  // All ranks of `options.ranks` in this process, for one thread each. They share one mapping of
  // each region, so that tools which know memory by its address see what the ranks do to it.
  static std::vector<std::unique_ptr<SymmetricMemory>> in_process(SymmetricOptions options);

  // What this rank's peers need to map its region.
  PeerAddress address() const;
  // Maps the regions of all ranks, in rank order. Afterwards the descriptor may be sealed as soon
  // as every peer has mapped, after which nothing but the mappings refers to the memory.
  void map(const std::vector<PeerAddress>& peers);
  void seal() { regions_.at(index(rank())).close_descriptor(); }
  void close();

  int32_t rank() const { return options_.rank; }
  int32_t ranks() const { return options_.ranks; }
  int64_t bytes() const { return options_.bytes; }
  int64_t mapped_bytes() const { return layout_.bytes() + options_.bytes; }

  // Where the modes' part of `peer`'s region begins in this process.
  std::byte* base(int32_t peer) const { return regions_[index(peer)].data() + layout_.bytes(); }
  // `bytes` of it from `offset` on, for who is not of the core. Throws Misuse once closed, and
  // BadArgument for what is not within.
  std::byte* window(int32_t peer, int64_t offset, int64_t bytes) const;

  // Stores `signal` at `offset` of `peer`'s part, after everything written there before, and wakes
  // the peer. `push_quietly` leaves the peer asleep: for what nobody waits for yet.
  void push(int32_t peer, int64_t offset, Signal signal) const;
  void push_quietly(int32_t peer, int64_t offset, Signal signal) const;
  void wake(int32_t peer) const { ring(control(peer).doorbell); }

  // The signal at `offset` of this rank's own part, as it is now.
  Signal peek(int64_t offset) const;

  // Waits until the signal has come; false if its peer is masked, before or through this wait.
  // `actual()` says for PeerTimeout what has come of what the signal's epoch counts. Throws
  // PeerTimeout, and BadArgument if ranks in different calls wait for each other.
  bool wait(const Awaited& awaited, const std::function<int64_t()>& actual);

  // Waits until `ready()`, blaming `facts()` (evaluated only then) if it does not come true in
  // time; `facts().peer` is watched for its end. False if the blamed peer was masked instead.
  bool wait_until(const std::function<bool()>& ready, const std::function<TimeoutFacts()>& facts) {
    return wait_for(ready, facts, nullptr);
  }

  // A refusal: the reason is stored before the caller pushes signals of value kRefusedValue.
  void set_reason(Phase phase, uint32_t epoch, const std::string& reason) const;
  RefusalFacts refusal(int32_t peer, Phase phase, uint32_t epoch) const;

  void barrier();

  bool masked(int32_t peer) const { return masked_[index(peer)] != 0; }
  void set_masked(int32_t peer, bool value) { masked_[index(peer)] = value ? 1 : 0; }

  // The peers that waits of this rank have masked so far, in order; `phase` with the
  // number of the call where a signal was waited for.
  const std::vector<TimeoutFacts>& late() const { return late_; }

  // Throws Misuse once closed, in a forked child, or after a wait has failed: the ranks no longer
  // agree about where they are, so going on could only deliver wrong data.
  void check_usable() const;

 private:
  static size_t index(int32_t peer) { return static_cast<size_t>(peer); }
  ControlBlock& control(int32_t peer) const {
    return *reinterpret_cast<ControlBlock*>(regions_[index(peer)].data());
  }
  uint64_t* word(int32_t peer, int64_t offset) const {
    return reinterpret_cast<uint64_t*>(base(peer) + offset);
  }
  // `awaited` is what is waited for, if that is one peer's signal; else null.
  bool wait_for(const std::function<bool()>& ready, const std::function<TimeoutFacts()>& facts,
                const Awaited* awaited);
  PendingView pending_view() const;
  [[noreturn]] void end_deadlocked(const Awaited& awaited, const std::vector<Blocked>& chain);

  SymmetricOptions options_;
  ControlLayout layout_;
  std::vector<Region> regions_;
  std::vector<RankHandle> handles_;
  std::vector<uint8_t> masked_;
  uint32_t generation_ = fork_generation();
  uint32_t barrier_epoch_ = 0;
  std::vector<TimeoutFacts> late_;
  std::string failure_;
  bool closed_ = false;
};

}  // namespace fanfold
