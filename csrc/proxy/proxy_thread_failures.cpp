// How a proxy's thread fails: what it looks for, and what it says.
#include <algorithm>
#include <string>
#include <utility>

#include "base/atomics.h"
#include "base/wait.h"
#include "proxy/proxy_thread.h"

namespace fanfold::proxy {
namespace {

using std::chrono::nanoseconds;

}  // namespace

const Failure* ProxyThread::lost(int32_t peer) const {
  const Channel* found = channel(peer);
  return found == nullptr ? nullptr : found->lost.load(std::memory_order_acquire);
}

// The last acknowledgement may come again at any time, and what is outstanding tells as much.
void ProxyThread::send_probe(int32_t peer) {
  if (!serves(peer) || channel_of(peer).failure != nullptr) return;
  if (transport_->probe(peer)) return;
  // Behind a barrier the peer may close its transport at any moment, and gets no message more.
  if (behind_barrier_) return;
  Channel& channel = channel_of(peer);
  if (channel.busy() || channel.in.acknowledgement_in_flight()) return;
  static_cast<void>(send_acknowledgement(channel, true));
}

// Kernels ask for a peer more often than a network should be asked, so that is done here, too.
void ProxyThread::check_timeouts() {
  if (elapsed_ < next_check_) return;
  next_check_ = elapsed_ + std::min<nanoseconds>(options_.timeout / 16, std::chrono::seconds(1));
  for (const int32_t peer : peers_) {
    if (rings_.take_question(peer)) send_probe(peer);
    Channel& channel = channel_of(peer);
    if (!channel.busy() || elapsed_ - channel.moved < options_.timeout) continue;
    stop_for(
        channel, FailureReason::kTimeout,
        channel.out.messages() > 0
            ? "proxy: acknowledgement of " + std::to_string(channel.out.messages()) + " messages"
            : "proxy: room in the transport " + std::string(transport_->name()));
    if (failure() != nullptr) return;
  }
  if (const uint64_t abandoned = rings_.abandoned(); abandoned > 0) {
    return fail(FailureReason::kCommand, -1,
                "producers gave up " + std::to_string(abandoned) +
                    " commands of a ring that stayed full, and the commands behind are lost");
  }
  if (!barrier_sent_ || elapsed_ - barrier_moved_ < options_.timeout) return;
  const std::string barrier = "barrier " + std::to_string(barriers_);
  if (barrier_next_ < peers_.size()) {
    return stop_for(channel_of(peers_[barrier_next_]), FailureReason::kBarrier,
                    "proxy: " + barrier);
  }
  for (const int32_t peer : peers_) {
    if (!channel_of(peer).owes()) continue;
    return stop_for(channel_of(peer), FailureReason::kBarrier,
                    "proxy: sending the acknowledgement of " + barrier);
  }
}

// A peer that has finished and ended is lost, too. So this fails only if something is outstanding.
void ProxyThread::lose(int32_t peer, FailureReason reason) {
  known_error_ = transport_->error();
  if (!serves(peer)) return fail(FailureReason::kTransport, peer, known_error_);
  Channel& channel = channel_of(peer);
  const bool awaited =
      barrier_sent_ && load_relaxed_system(memory_.counters + int64_t{peer} * kCounters +
                                           kBarrierCounter) < barriers_;
  if (channel.busy() || awaited) return stop_for(channel, reason, known_error_);
  mark_lost(channel, reason, known_error_);
}

void ProxyThread::mark_lost(Channel& channel, FailureReason reason, const std::string& text) {
  if (channel.failure != nullptr) return;
  channel.failure = std::make_unique<const Failure>(describe(reason, channel.peer, text));
  channel.lost.store(channel.failure.get(), std::memory_order_release);
  rings_.tell_lost(channel.peer);
  if (channel.in.acknowledgement_in_flight()) --acks_in_flight_;  // may never complete
  if (memory_.bell != nullptr) fanfold::ring(*memory_.bell);
}

// What is in flight to a peer that is given up keeps its place in the window and the outbox, where
// the transport may still read it.
void ProxyThread::stop_for(Channel& channel, FailureReason reason, const std::string& text) {
  const bool gives_up = options_.give_up_peers || reason == FailureReason::kEnded;
  if (!gives_up) return fail(reason, channel.peer, text);
  mark_lost(channel, reason, text);
  if (std::exchange(channel.given_up, true)) return;
  in_flight_ -= channel.out.messages();
  pending_ -= static_cast<int64_t>(channel.pending.size());
  channel.counted.add(&Stats::dropped, channel.pending.size());
  while (!channel.pending.empty()) channel.pending.pop();
}

void ProxyThread::die(const std::string& what) {
  fail(FailureReason::kProxy, -1, "the proxy's thread has ended: " + what);
}

void ProxyThread::fail(FailureReason reason, int32_t peer, const std::string& text) {
  if (failure_ != nullptr) return;
  failure_ = std::make_unique<const Failure>(describe(reason, peer, text));
  failed_.store(failure_.get(), std::memory_order_release);
  for (const int32_t other : peers_) rings_.tell_lost(other);
  if (memory_.bell != nullptr) fanfold::ring(*memory_.bell);
}

Failure ProxyThread::describe(FailureReason reason, int32_t peer, const std::string& text) const {
  Failure failure{.reason = reason,
                  .rank = options_.rank,
                  .peer = peer,
                  .thread = index_,
                  .messages = 0,
                  .bytes = 0,
                  .seconds = 0,
                  .transport = std::string(transport_->name()),
                  .text = text,
                  .path = path(peer)};
  nanoseconds oldest = elapsed_;
  for (const int32_t other : peers_) {
    const Channel& each = *channels_[place(other)];
    if (!each.busy() || (serves(peer) && other != peer)) continue;
    failure.messages += each.out.messages() + static_cast<int64_t>(each.pending.size());
    failure.bytes += each.out.bytes();
    oldest = std::min(oldest, each.moved);
  }
  if (reason == FailureReason::kBarrier) oldest = barrier_moved_;
  failure.seconds = std::chrono::duration<double>(elapsed_ - oldest).count();
  return failure;
}

}  // namespace fanfold::proxy
