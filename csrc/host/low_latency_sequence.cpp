#include "host/low_latency_sequence.h"

#include <chrono>
#include <utility>

namespace fanfold {
namespace {

constexpr const char* kLostHook =
    "If the hook is lost, give the call up on all ranks: reset() of a LowLatency, "
    "clean_low_latency_buffer() of a Buffer";

}  // namespace

LowLatencySequence::LowLatencySequence(SymmetricMemory& memory, int64_t offset, Phase phase,
                                       uint32_t epoch)
    : memory_(memory), offset_(offset), signals_{memory.ranks()}, phase_(phase), epoch_(epoch) {
  if (phase != Phase::kLowLatencyCombine) return;
  signature_kind_ = Kind::kCombineSignature;
  arrival_kind_ = Kind::kCombined;
  ack_kind_ = Kind::kCombineAck;
}

// --- The course of a call -------------------------------------------------------------------

uint32_t LowLatencySequence::open() {
  memory_.check_usable();
  const uint32_t epoch = epoch_ + 1;
  if (call_at(epoch).in_flight) {
    throw Misuse(std::string("the last call but one of ") + name_of(phase_) +
                 " is still in flight, and two may be; call its hook first. " + kLostHook);
  }
  // This rank may write to a parity again only after the peers have read its previous rows.
  await_acks(epoch, epoch - kParities);
  epoch_ = epoch;
  call_at(epoch) = Call{.in_flight = true, .signature = {}, .refused_by = {}, .disagreement = {}};
  return epoch;
}

uint32_t LowLatencySequence::begin(const LowLatencySignature& own) {
  const uint32_t epoch = open();
  call_at(epoch).signature = own;
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    if (memory_.masked(peer)) continue;
    const Peer& to = memory_.peer(peer);
    to.put(signature_offset(memory_.rank(), epoch), &own, sizeof own);
    to.signal_quietly(signal(signature_kind_, epoch, memory_.rank()), Signal{epoch, 0});
  }
  return epoch;
}

void LowLatencySequence::agree(uint32_t epoch) {
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    if (!memory_.masked(peer)) memory_.peer(peer).wake();
  }
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    if (await_signal(signature_kind_, epoch, peer)) compare(epoch, peer);
  }
  const Call& call = call_at(epoch);
  if (call.refused_by) {
    // Peers for which the geometry is not new do not agree first; they wait for rows already.
    for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
      if (!memory_.masked(peer)) publish(epoch, peer, 0);
    }
    finish(epoch);
  } else if (call.disagreement) {
    publish_refusal(epoch, call.disagreement->what());
    finish(epoch);
  }
}

void LowLatencySequence::publish(uint32_t epoch, int32_t peer, int32_t value) const {
  const int64_t offset = signal(arrival_kind_, epoch, memory_.rank());
  memory_.peer(peer).signal(offset, Signal{epoch, value});
}

void LowLatencySequence::publish_late_routing(uint32_t epoch, int32_t peer, int32_t tokens) const {
  const int64_t offset = signal(Kind::kLateRouting, epoch, memory_.rank());
  memory_.peer(peer).signal(offset, Signal{epoch, tokens});
}

void LowLatencySequence::release(uint32_t epoch) {
  call_at(epoch).in_flight = false;
  // Receives may come in any order, but an acknowledgement covers all calls up to its epoch.
  const uint32_t last = epoch_;
  const uint32_t acknowledged = call_at(last - 1).in_flight ? last - 2
                                : call_at(last).in_flight   ? last - 1
                                                            : last;
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    memory_.peer(peer).signal(ack_offset(memory_.rank()), Signal{acknowledged, 0});
  }
}

void LowLatencySequence::finish(uint32_t epoch) {
  const Call call = call_at(epoch);
  // Read the reason before acknowledging the call: afterwards the refuser may overwrite it.
  std::optional<RefusalReport> refusal;
  if (call.refused_by) refusal = memory_.refusal(*call.refused_by, phase_, epoch);
  release(epoch);
  // A rank that finds a disagreement may also refuse the call. All ranks must throw the same error.
  if (call.disagreement) throw BadArgument(*call.disagreement);
  if (refusal) throw PeerRefused(*refusal);
}

void LowLatencySequence::give_up() {
  memory_.check_usable();
  bool any = false;
  for (Call& call : calls_) any = std::exchange(call.in_flight, false) || any;
  if (!any) return;
  // The peers acknowledge a call that they have given up, whether or not it has left this rank.
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    if (!memory_.masked(peer)) memory_.peer(peer).fence();
  }
  // This rank may acknowledge slots that a peer has yet to write: the peer writes them before it
  // sends the next call of the same parity.
  release(epoch_);
}

void LowLatencySequence::refuse(const std::string& reason) {
  const uint32_t epoch = open();
  publish_refusal(epoch, reason);
  release(epoch);
}

void LowLatencySequence::publish_refusal(uint32_t epoch, const std::string& reason) const {
  memory_.set_reason(phase_, epoch, reason);
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    if (peer != memory_.rank() && !memory_.masked(peer)) publish(epoch, peer, kRefusedValue);
  }
}

// --- Arrivals -------------------------------------------------------------------------------

// Waits, in `call`, until every peer has read the rows of all calls up to `epoch`.
void LowLatencySequence::await_acks(uint32_t call, uint32_t epoch) const {
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    const int64_t offset = ack_offset(peer);
    const AwaitedSignal awaited{.peer = peer,
                                .phase = phase_,
                                .call = call,
                                .epoch = epoch,
                                .offset = offset,
                                .alternative = offset,
                                .detail = " (acknowledgements of earlier calls)"};
    memory_.wait(awaited, [&] { return memory_.peek(offset).epoch; });
  }
}

int64_t LowLatencySequence::latest(Kind kind, uint32_t epoch, int32_t peer) const {
  // Two calls may be in flight, each with its own word. The word of the awaited call may hold the
  // last call but one although the signal of the last call has arrived.
  uint32_t last = epoch - kParities;
  for (const Kind either : {kind, arrival_kind_}) {
    for (const uint32_t call : {epoch - 1, epoch}) {
      if (has(either, call, peer) && reached(call, last)) last = call;
    }
  }
  return last;
}

// Waits for a signal of `kind`, or for the arrival, of `peer`. Returns false if the peer is masked.
bool LowLatencySequence::await_signal(Kind kind, uint32_t epoch, int32_t peer) const {
  // Exact, because a word that no call has used for 2^31 calls seems to be ahead.
  const AwaitedSignal awaited{.peer = peer,
                              .phase = phase_,
                              .call = epoch,
                              .epoch = epoch,
                              .offset = signal(kind, epoch, peer),
                              .alternative = signal(arrival_kind_, epoch, peer),
                              .exact = kind != arrival_kind_};
  return memory_.wait(awaited, [&] { return latest(kind, epoch, peer); });
}

int32_t LowLatencySequence::await(uint32_t epoch, int32_t peer, int64_t* wait_ns) {
  const auto start = std::chrono::steady_clock::now();
  const bool arrived = await_signal(arrival_kind_, epoch, peer);
  if (wait_ns != nullptr) {
    wait_ns[peer] += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
  }
  if (!arrived) return 0;
  compare(epoch, peer);
  return is_aborted(epoch) ? 0 : memory_.peek(signal(arrival_kind_, epoch, peer)).value;
}

int32_t LowLatencySequence::await_late_routing(uint32_t epoch, int32_t peer) {
  if (!await_signal(Kind::kLateRouting, epoch, peer)) return 0;
  return has(Kind::kLateRouting, epoch, peer)
             ? memory_.peek(signal(Kind::kLateRouting, epoch, peer)).value
             : 0;
}

// Records whether `peer` has refused this call or sent another signature. Its signature or its
// arrival must have arrived.
void LowLatencySequence::compare(uint32_t epoch, int32_t peer) {
  Call& call = call_at(epoch);
  const Signal arrival = memory_.peek(signal(arrival_kind_, epoch, peer));
  if (arrival.epoch == epoch && arrival.value == kRefusedValue) call.refused_by = peer;
  if (!has(signature_kind_, epoch, peer)) return;  // a refusal instead of a call
  const LowLatencySignature& ours = call.signature;
  const auto& theirs =
      *reinterpret_cast<const LowLatencySignature*>(memory_.own() + signature_offset(peer, epoch));
  const auto same = [&](const char* name, int32_t own, int32_t other) {
    if (own == other || call.disagreement) return;
    call.disagreement = disagreement(name, own, memory_.rank(), other, peer);
  };
  same("num_experts", ours.experts, theirs.experts);
  same("top_k", ours.top_k, theirs.top_k);
  same("hidden", ours.hidden, theirs.hidden);
  same("max_tokens (num_max_dispatch_tokens_per_rank)", ours.max_tokens, theirs.max_tokens);
  same("encoding of rows (0 bf16, 1 fp8, 2 fp8 with power-of-two scales, 3 nvfp4)", ours.encoding,
       theirs.encoding);
  same("weights (0 none, 1 with dispatch, 2 with combine)", ours.weights, theirs.weights);
}

void LowLatencySequence::require_in_flight(uint32_t epoch) const {
  memory_.check_usable();
  if (!call_at(epoch).in_flight || !reached(epoch_, epoch) || reached(epoch_, epoch + kParities)) {
    throw Misuse(std::string("this call of ") + name_of(phase_) + " (epoch " +
                 std::to_string(epoch) +
                 ") has been received already, or a reset has given it up; its hook receives "
                 "nothing");
  }
}

void LowLatencySequence::quiesce() {
  for (const Call& call : calls_) {
    if (!call.in_flight) continue;
    throw Misuse(std::string("a call of ") + name_of(phase_) +
                 " is in flight; call its hook before the geometry changes. " + kLostHook);
  }
  await_acks(epoch_, epoch_);
}

}  // namespace fanfold
