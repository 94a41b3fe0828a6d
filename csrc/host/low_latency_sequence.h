// The calls of one kind, dispatch or combine, of the low-latency mode as all ranks see them:
// numbered, agreed, at most two in flight, void everywhere if one rank refuses.
//
// The n-th call of every rank belongs together. A rank announces the facts of its call before
// anything else. Where the geometry is the one of the last call that all agreed to, it sends at
// once, and each receiver compares the facts when the rows arrive; where it is not, the memory is
// laid out anew, so the rank first waits for the facts of all others.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "layout/low_latency.h"
#include "memory/symmetric.h"

namespace fanfold {

class LowLatencySequence {
 public:
  using Kind = LowLatencySignals::Kind;

  // Uses the signals at `offset` of `memory`. `epoch` is what they have all reached.
  LowLatencySequence(SymmetricMemory& memory, int64_t offset, Phase phase, uint32_t epoch);

  // Begins the next call with `facts`, once every peer has read the last call but one. Throws
  // Misuse and PeerTimeout.
  uint32_t begin(const LowLatencySignature& facts);
  // Returns when every peer has announced the same facts. If one differs, or has refused, the call
  // ends here on this rank: throws BadArgument or PeerRefused.
  void agree(uint32_t epoch);

  // `value` for `peer`, after all that was written for it in this call.
  void publish(uint32_t epoch, int32_t peer, int32_t value) const;
  void publish_late_routing(uint32_t epoch, int32_t peer, int32_t tokens) const;

  // What `peer` published: zero for a masked peer, and for one whose call does not fit this one.
  // That is remembered: the call goes on with the others, so that all ranks stay in step, and
  // `finish` throws. Nanoseconds waited are added to `wait_ns`, if given.
  int32_t await(uint32_t epoch, int32_t peer, int64_t* wait_ns);
  // The same for the late routing. A peer that sends none has published all the same.
  int32_t await_late_routing(uint32_t epoch, int32_t peer);
  bool is_void(uint32_t epoch) const {
    const Call& call = call_at(epoch);
    return call.refused_by || call.disagreement;
  }

  // Ends the call: its rows may be overwritten. Throws PeerRefused and BadArgument if it is void.
  void finish(uint32_t epoch);
  // Takes part in the next call as one who refuses it, for `reason`.
  void refuse(const std::string& reason);

  // Ends the calls in flight without their rows: nobody will receive them.
  void give_up();

  // Throws Misuse unless the call of `epoch` is in flight.
  void require_in_flight(uint32_t epoch) const;
  // Returns when every peer has read everything. Throws Misuse if a call is in flight.
  void quiesce();

 private:
  struct Call {
    bool in_flight = false;
    LowLatencySignature facts{};  // what this rank means
    std::optional<int32_t> refused_by;
    std::optional<BadArgument> disagreement;
  };

  Call& call_at(uint32_t epoch) { return calls_[parity_of(epoch)]; }
  const Call& call_at(uint32_t epoch) const { return calls_[parity_of(epoch)]; }
  int64_t signal(Kind kind, uint32_t epoch, int32_t peer) const {
    return offset_ + signals_.offset(kind, parity_of(epoch), peer);
  }
  int64_t taken(int32_t peer) const { return offset_ + signals_.offset(taken_, 0, peer); }
  LowLatencySignature& facts_of(int32_t peer, int32_t owner, uint32_t epoch) const;
  bool has(Kind kind, uint32_t epoch, int32_t peer) const {
    // Not "at least": a word that no call has used for 2^31 calls looks as if it were ahead.
    return memory_.peek(signal(kind, epoch, peer)).epoch == epoch;
  }

  // What a peer has told of `kind`, or of all of a call: the last epoch up to `epoch`.
  int64_t latest(Kind kind, uint32_t epoch, int32_t peer) const;
  void await_taken(uint32_t call, uint32_t epoch) const;
  uint32_t open();
  void publish_refusal(uint32_t epoch, const std::string& reason) const;
  void release(uint32_t epoch);
  bool await_either(Kind kind, uint32_t epoch, int32_t peer) const;
  void compare(uint32_t epoch, int32_t peer);

  SymmetricMemory& memory_;
  int64_t offset_;
  LowLatencySignals signals_;
  Phase phase_;
  Kind announced_ = Kind::kDispatchAnnounced;
  Kind arrived_ = Kind::kDispatched;
  Kind taken_ = Kind::kDispatchTaken;
  uint32_t epoch_;
  Call calls_[kParities];
};

}  // namespace fanfold
