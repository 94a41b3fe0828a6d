// Keeps all ranks in step over the dispatches, or over the combines, of the low-latency mode. It
// numbers the calls, compares their signatures, limits the calls in flight to two, and aborts a
// call on every rank if one rank refuses it.
//
// The n-th calls of all ranks belong together. A rank sends the signature of its call before any
// row. If the geometry is the one of the last call that all ranks agreed to, the rank sends its
// rows at once, and each receiver compares the signatures when the rows arrive. If the geometry is
// new, the layout of the memory changes, so the rank first waits for the signatures of all others.
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

  // Uses the signals at `offset` of `memory`, which must all have reached `epoch`.
  LowLatencySequence(SymmetricMemory& memory, int64_t offset, Phase phase, uint32_t epoch);

  // Begins the next call and sends its signature, once every peer has read the last call but one.
  // Returns the call's epoch. Throws Misuse and PeerTimeout.
  uint32_t begin(const LowLatencySignature& signature);
  // Waits until every peer has sent the same signature. If one differs, or a peer has refused, ends
  // the call on this rank and throws BadArgument or PeerRefused.
  void agree(uint32_t epoch);

  // Sends `peer` the arrival of this call with `value`, after all rows that it covers.
  void publish(uint32_t epoch, int32_t peer, int32_t value) const;
  void publish_late_routing(uint32_t epoch, int32_t peer, int32_t tokens) const;

  // Waits for the arrival of `peer` and returns its value. Returns 0 if the peer is masked or the
  // call is aborted. A refusal, or another signature, of `peer` aborts the call. An aborted call
  // still awaits the other peers, so that all ranks stay in step; then `finish` throws. Adds the
  // nanoseconds of the wait to `wait_ns`, if given.
  int32_t await(uint32_t epoch, int32_t peer, int64_t* wait_ns);
  // Like `await`, for the late routing. Returns 0 if the arrival of `peer` shows that it sends
  // none.
  int32_t await_late_routing(uint32_t epoch, int32_t peer);
  // Whether a peer has refused the call, or a signature differs, as far as this rank has received.
  bool is_aborted(uint32_t epoch) const {
    const Call& call = call_at(epoch);
    return call.refused_by || call.disagreement;
  }

  // Ends the call and lets the peers overwrite its rows. Throws PeerRefused or BadArgument if the
  // call is aborted.
  void finish(uint32_t epoch);
  // Takes part in the next call by refusing it for `reason`.
  void refuse(const std::string& reason);

  // Ends the calls in flight without receiving their rows.
  void give_up();

  // Throws Misuse unless the call of `epoch` is in flight.
  void require_in_flight(uint32_t epoch) const;
  // Waits until every peer has read all rows of this rank. Throws Misuse if a call is in flight.
  void quiesce();

 private:
  struct Call {
    bool in_flight = false;
    LowLatencySignature signature{};  // of this rank
    std::optional<int32_t> refused_by;
    std::optional<BadArgument> disagreement;
  };

  Call& call_at(uint32_t epoch) { return calls_[parity_of(epoch)]; }
  const Call& call_at(uint32_t epoch) const { return calls_[parity_of(epoch)]; }
  int64_t signal(Kind kind, uint32_t epoch, int32_t peer) const {
    return offset_ + signals_.offset(kind, parity_of(epoch), peer);
  }
  int64_t ack_offset(int32_t peer) const { return offset_ + signals_.offset(ack_kind_, 0, peer); }
  // Where the signature of `peer`'s call lies in each rank's memory.
  int64_t signature_offset(int32_t peer, uint32_t epoch) const {
    return offset_ + signals_.signature_offset(signature_kind_, parity_of(epoch), peer);
  }
  bool has(Kind kind, uint32_t epoch, int32_t peer) const {
    // Compares for equality, because a word that no call has used for 2^31 calls seems to be ahead.
    return memory_.peek(signal(kind, epoch, peer)).epoch == epoch;
  }

  // The last epoch up to `epoch` for which `peer` has sent a signal of `kind`, or an arrival.
  int64_t latest(Kind kind, uint32_t epoch, int32_t peer) const;
  void await_acks(uint32_t call, uint32_t epoch) const;
  uint32_t open();
  void publish_refusal(uint32_t epoch, const std::string& reason) const;
  void release(uint32_t epoch);
  bool await_signal(Kind kind, uint32_t epoch, int32_t peer) const;
  void compare(uint32_t epoch, int32_t peer);

  SymmetricMemory& memory_;
  int64_t offset_;
  LowLatencySignals signals_;
  Phase phase_;
  Kind signature_kind_ = Kind::kDispatchSignature;
  Kind arrival_kind_ = Kind::kDispatched;
  Kind ack_kind_ = Kind::kDispatchAck;
  uint32_t epoch_;
  Call calls_[kParities];
};

}  // namespace fanfold
