// What a proxy's thread does with messages that come, and its answers to them.
#include <utility>

#include "base/atomics.h"
#include "proxy/proxy_thread.h"

namespace fanfold::proxy {
namespace {

using transport::Code;
using transport::Event;
using transport::EventKind;

constexpr int kPolls = 4;  // of one step

}  // namespace

bool ProxyThread::poll() {
  bool worked = false;
  for (int round = 0; round < kPolls; ++round) {
    const int32_t events = transport_->poll(events_);
    for (int32_t i = 0; i < events && failure() == nullptr; ++i) {
      handle(events_[static_cast<size_t>(i)]);
    }
    worked = worked || events > 0;
    if (std::cmp_less(events, events_.size())) break;
  }
  if (failure() == nullptr && transport_->error() != known_error_) {
    fail(FailureReason::kTransport, -1, transport_->error());
  }
  return worked;
}

void ProxyThread::handle(const Event& event) {
  switch (event.kind) {
    case EventKind::kArrival:
      return arrive(event);
    case EventKind::kCompletion:
      return complete(event.context);
    case EventKind::kPeerFailed:
      return lose(event.peer, FailureReason::kPeer);
    case EventKind::kPeerEnded:
      return lose(event.peer, FailureReason::kEnded);
  }
  fail(FailureReason::kTransport, -1,
       "reported an event of unknown kind " + std::to_string(static_cast<int32_t>(event.kind)));
}

void ProxyThread::arrive(const Event& event) {
  const DecodedImmediate decoded = layout_.decode(event.immediate);
  const Immediate& immediate = decoded.immediate;
  const bool known = decoded.fault == ImmediateFault::kNone && serves(immediate.source) &&
                     (event.peer < 0 || event.peer == immediate.source);
  if (!known) {
    return fail(FailureReason::kImmediate, event.peer,
                "the immediate " + std::to_string(event.immediate) +
                    " arrived, which no peer of this thread writes");
  }
  Channel& channel = channel_of(immediate.source);
  if (immediate.kind == ImmediateKind::kAcknowledgement) {
    channel.counted.add(&Stats::acks_received);
    if (channel.given_up) return;
    freeing(channel, [&] { return channel.out.acknowledge(immediate.amount); });
  } else {
    accept(channel, immediate);
  }
}

void ProxyThread::accept(Channel& channel, const Immediate& immediate) {
  channel.counted.add(&Stats::arrivals);
  const Acceptance acceptance = channel.in.accept(immediate);
  if (acceptance == Acceptance::kInvalid) {
    return fail(FailureReason::kImmediate, channel.peer,
                "message " + std::to_string(immediate.sequence) +
                    " arrived, which is outside of the window");
  }
  if (acceptance == Acceptance::kDuplicate) return channel.counted.add(&Stats::duplicates);
  if (immediate.kind == ImmediateKind::kData) {
    count(channel.peer, {immediate.counter, immediate.amount});
    channel.counted.add(&Stats::parts_received, immediate.amount);
  }
  const uint64_t before = channel.in.accepted_in_order();
  while (const std::optional<Due> due = channel.in.next_due()) {
    if (due->store) {
      store(channel.peer, due->sequence);
    } else {
      count(channel.peer, due->addition);
    }
  }
  if (channel.in.accepted_in_order() == before) channel.counted.add(&Stats::reordered);
  channel.arrived = true;
  add_news(channel);
}

// Released after the transport has put the bytes in place, so that a consumer that acquires the
// counter sees them.
void ProxyThread::count(int32_t source, const Addition& addition) {
  uint64_t* counter = memory_.counters + int64_t{source} * kCounters + addition.counter;
  store_release_system(counter, load_relaxed_system(counter) + addition.amount);
  grown_ = true;
}

// The place of the word is free for the next message of its number once this one is acknowledged.
void ProxyThread::store(int32_t source, uint64_t sequence) {
  const StoredWord stored = stored_[static_cast<size_t>(inbox_place(source, sequence))];
  constexpr auto kWord = int64_t{sizeof(uint64_t)};
  if (stored.offset < 0 || stored.offset > memory_.bytes - kWord || stored.offset % kWord != 0) {
    return fail(FailureReason::kImmediate, source,
                "a store at " + std::to_string(stored.offset) + " arrived for a memory of " +
                    std::to_string(memory_.bytes) + " bytes");
  }
  if (memory_.store) {
    memory_.store(stored.offset, stored.word);
  } else {
    store_release_system(reinterpret_cast<uint64_t*>(memory_.data + stored.offset), stored.word);
  }
  grown_ = true;
}

template <typename Change>
void ProxyThread::freeing(Channel& channel, Change change) {
  const int32_t before = channel.out.messages();
  const bool moved = change();
  in_flight_ -= before - channel.out.messages();
  if (moved) channel.moved = elapsed_;
}

void ProxyThread::complete(uint64_t context) {
  const uint64_t peer = context >> kPeerShift;
  bool known = std::cmp_less(peer, options_.ranks) && serves(static_cast<int32_t>(peer));
  if (known) {
    Channel& channel = channel_of(static_cast<int32_t>(peer));
    if ((context & kAcknowledgementContext) != 0) {
      known = channel.in.acknowledgement_completed();
      if (known && channel.failure == nullptr) --acks_in_flight_;
      if (channel.in.news() > 0) add_news(channel);
    } else if (!channel.given_up) {
      const uint64_t sequence = channel.whole(static_cast<uint32_t>(context));
      freeing(channel, [&] { return known = channel.out.complete(sequence); });
      if (known) count_time(channel, &Stats::transit_ns, channel.when_sent(sequence));
    }
  }
  if (known) return;
  fail(FailureReason::kTransport, -1,
       "reported a completion of " + std::to_string(context) + ", which is not in flight");
}

bool ProxyThread::acknowledge() {
  bool worked = false;
  size_t kept = 0;
  for (const int32_t peer : news_) {
    Channel& channel = channel_of(peer);
    const bool quiet = !std::exchange(channel.arrived, false);
    bool reachable = true;
    if (failure() == nullptr && channel.in.should_acknowledge(quiet)) {
      const Code code = send_acknowledgement(channel);
      worked = worked || code == Code::kOk;
      reachable = code != Code::kFailed;
    }
    // What a lost peer cannot be told, or may never be, keeps no thread awake.
    if (channel.failure != nullptr && channel.in.acknowledgement_in_flight()) reachable = false;
    channel.in_news = reachable && channel.in.news() > 0;
    if (channel.in_news) news_[kept++] = peer;
  }
  news_.resize(kept);
  return worked;
}

Code ProxyThread::send_acknowledgement(Channel& channel, bool reported) {
  const auto accepted =
      static_cast<uint32_t>(channel.in.accepted_in_order()) & layout_.acknowledgement_mask();
  transport::Write message{.peer = channel.peer,
                           .rail = 0,
                           .source = local_,
                           .source_offset = 0,
                           .target = channel.target,
                           .target_offset = 0,
                           .bytes = 0,
                           .immediate = layout_
                                            .encode({.kind = ImmediateKind::kAcknowledgement,
                                                     .source = options_.rank,
                                                     .amount = accepted})
                                            .word,
                           .context = context_of(channel.peer) | kAcknowledgementContext,
                           .reported = reported};
  const Code code = write(message);
  if (code == Code::kFailed) lose(channel.peer, FailureReason::kPeer);
  if (code != Code::kOk) return code;
  channel.in.acknowledgement_sent();
  if (channel.failure == nullptr) ++acks_in_flight_;
  channel.counted.add(&Stats::acks_sent);
  return code;
}

}  // namespace fanfold::proxy
