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
  announced_ = Kind::kCombineAnnounced;
  arrived_ = Kind::kCombined;
  taken_ = Kind::kCombineTaken;
}

// What `peer` has told `owner` about its call.
LowLatencySignature& LowLatencySequence::facts_of(int32_t peer, int32_t owner,
                                                  uint32_t epoch) const {
  const int64_t place = offset_ + signals_.signature_offset(announced_, parity_of(epoch), peer);
  return *reinterpret_cast<LowLatencySignature*>(memory_.base(owner) + place);
}

// --- The course of a call -------------------------------------------------------------------

uint32_t LowLatencySequence::open() {
  memory_.check_usable();
  const uint32_t epoch = epoch_ + 1;
  if (call_at(epoch).in_flight) {
    throw Misuse(std::string("the last call but one of ") + name_of(phase_) +
                 " is still in flight, and two may be; call its hook first. " + kLostHook);
  }
  // A parity is written again only when its previous rows have been read by the peer.
  await_taken(epoch, epoch - kParities);
  epoch_ = epoch;
  call_at(epoch) = Call{.in_flight = true, .facts = {}, .refused_by = {}, .disagreement = {}};
  return epoch;
}

uint32_t LowLatencySequence::begin(const LowLatencySignature& own) {
  const uint32_t epoch = open();
  call_at(epoch).facts = own;
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    if (memory_.masked(peer)) continue;
    facts_of(memory_.rank(), peer, epoch) = own;
    memory_.push_quietly(peer, signal(announced_, epoch, memory_.rank()), Signal{epoch, 0});
  }
  return epoch;
}

void LowLatencySequence::agree(uint32_t epoch) {
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    if (peer != memory_.rank() && !memory_.masked(peer)) memory_.wake(peer);
  }
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    if (await_either(announced_, epoch, peer)) compare(epoch, peer);
  }
  const Call& call = call_at(epoch);
  if (call.refused_by) {
    // Some may not need to agree, and wait for rows by now.
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
  memory_.push(peer, signal(arrived_, epoch, memory_.rank()), Signal{epoch, value});
}

void LowLatencySequence::publish_late_routing(uint32_t epoch, int32_t peer, int32_t tokens) const {
  memory_.push(peer, signal(Kind::kLateRouting, epoch, memory_.rank()), Signal{epoch, tokens});
}

void LowLatencySequence::release(uint32_t epoch) {
  call_at(epoch).in_flight = false;
  // Receives may come in any order, but a peer takes "taken" for all calls up to this epoch.
  const uint32_t last = epoch_;
  const uint32_t all_taken = call_at(last - 1).in_flight ? last - 2
                             : call_at(last).in_flight   ? last - 1
                                                         : last;
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    memory_.push(peer, taken(memory_.rank()), Signal{all_taken, 0});
  }
}

void LowLatencySequence::finish(uint32_t epoch) {
  const Call call = call_at(epoch);
  // Once this call counts as taken, a refuser may write its next reason, so its last is read first.
  std::optional<RefusalFacts> refusal;
  if (call.refused_by) refusal = memory_.refusal(*call.refused_by, phase_, epoch);
  release(epoch);
  // Ranks that disagree also refuse, sooner or later; all shall throw the same.
  if (call.disagreement) throw BadArgument(*call.disagreement);
  if (refusal) throw PeerRefused(*refusal);
}

void LowLatencySequence::give_up() {
  memory_.check_usable();
  bool any = false;
  for (Call& call : calls_) any = std::exchange(call.in_flight, false) || any;
  // A peer that has yet to send for such a call writes before it sends for the next one of its
  // parity, so slots may count as read.
  if (any) release(epoch_);
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

// Waits in `call` until every peer has read all that calls up to `epoch` sent it.
void LowLatencySequence::await_taken(uint32_t call, uint32_t epoch) const {
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    const int64_t offset = taken(peer);
    const Awaited awaited{.peer = peer,
                          .phase = phase_,
                          .call = call,
                          .epoch = epoch,
                          .offset = offset,
                          .other = offset,
                          .what = " (acknowledgements of earlier calls)"};
    memory_.wait(awaited, [&] { return memory_.peek(offset).epoch; });
  }
}

int64_t LowLatencySequence::latest(Kind kind, uint32_t epoch, int32_t peer) const {
  // Two calls may be in flight, each in a word of its own: that of the awaited call may hold the
  // last call but one although the last has come.
  uint32_t last = epoch - kParities;
  for (const Kind either : {kind, arrived_}) {
    for (const uint32_t call : {epoch - 1, epoch}) {
      if (has(either, call, peer) && reached(call, last)) last = call;
    }
  }
  return last;
}

// Waits until `peer` has sent a signal of `kind` or all of its call; false if it is masked.
bool LowLatencySequence::await_either(Kind kind, uint32_t epoch, int32_t peer) const {
  // Not "at least": a word that no call has used for 2^31 calls looks as if it were ahead.
  const Awaited awaited{.peer = peer,
                        .phase = phase_,
                        .call = epoch,
                        .epoch = epoch,
                        .offset = signal(kind, epoch, peer),
                        .other = signal(arrived_, epoch, peer),
                        .exact = kind != arrived_};
  return memory_.wait(awaited, [&] { return latest(kind, epoch, peer); });
}

int32_t LowLatencySequence::await(uint32_t epoch, int32_t peer, int64_t* wait_ns) {
  const auto start = std::chrono::steady_clock::now();
  const bool arrived = await_either(arrived_, epoch, peer);
  if (wait_ns != nullptr) {
    wait_ns[peer] += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
  }
  if (!arrived) return 0;
  compare(epoch, peer);
  return is_void(epoch) ? 0 : memory_.peek(signal(arrived_, epoch, peer)).value;
}

int32_t LowLatencySequence::await_late_routing(uint32_t epoch, int32_t peer) {
  if (!await_either(Kind::kLateRouting, epoch, peer)) return 0;
  return has(Kind::kLateRouting, epoch, peer)
             ? memory_.peek(signal(Kind::kLateRouting, epoch, peer)).value
             : 0;
}

// Remembers if `peer`, which has announced this call or ended it, refused it or means another one.
void LowLatencySequence::compare(uint32_t epoch, int32_t peer) {
  Call& call = call_at(epoch);
  const Signal arrival = memory_.peek(signal(arrived_, epoch, peer));
  if (arrival.epoch == epoch && arrival.value == kRefusedValue) call.refused_by = peer;
  if (!has(announced_, epoch, peer)) return;  // a refusal instead of a call
  const LowLatencySignature& ours = call.facts;
  const LowLatencySignature& theirs = facts_of(peer, memory_.rank(), epoch);
  const auto same = [&](const char* name, int32_t own, int32_t other) {
    if (own == other || call.disagreement) return;
    call.disagreement = disagreement(name, own, memory_.rank(), other, peer);
  };
  same("num_experts", ours.experts, theirs.experts);
  same("top_k", ours.top_k, theirs.top_k);
  same("hidden", ours.hidden, theirs.hidden);
  same("max_tokens (num_max_dispatch_tokens_per_rank)", ours.max_tokens, theirs.max_tokens);
  same("encoding of rows (0 bf16, 1 fp8, 2 fp8 with power-of-two scales)", ours.encoding,
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
  await_taken(epoch_, epoch_);
}

}  // namespace fanfold
