// The receiving side of the loopback network, completions and failures.
#include <algorithm>
#include <cstring>

#include "transport/loopback_state.h"

namespace fanfold::transport::loopback {
namespace {

std::pair<int32_t, int32_t> both(int32_t rank, int32_t peer) {
  return {std::min(rank, peer), std::max(rank, peer)};
}

// A duplicate writes only bytes that differ, so that a sanitizer sees no race with a reader of the
// bytes that landed first.
void copy_into(std::byte* to, const std::byte* from, int64_t bytes, bool duplicate) {
  if (bytes == 0) return;
  const auto count = static_cast<size_t>(bytes);
  if (duplicate && std::memcmp(to, from, count) == 0) return;
  std::memcpy(to, from, count);
}

}  // namespace

// --- Arrival ----------------------------------------------------------------------------------

void State::arrive(const MessagePtr& message, bool duplicate) {
  if (lost(*message)) return;
  Endpoint& target = *endpoints_[message->target];
  if (!target.open) {
    lose(message, "the peer has gone");
    return;
  }
  if (held_by_cut(message, duplicate)) return;
  Rail& rail = target.rails[static_cast<size_t>(message->write.rail)];
  const Inbound inbound{now_, order_++, message, -1, duplicate, false};
  if (options.receive_queue == 0 || rail.queued < options.receive_queue) {
    enter_queue(rail, inbound);
  } else if (options.overflow == Overflow::kStallsSender) {
    ++counters_.waited_for_queue;
    rail.waiting.push_back(inbound);
  } else {
    ++counters_.waited_for_queue;
    lose(message,
         "its receive queue of " + std::to_string(options.receive_queue) + " writes overflowed");
  }
  if (options.lands_without_poll) land_without_poll(target);
}

bool State::held_by_cut(const MessagePtr& message, bool duplicate) {
  const Endpoint& source = *endpoints_[message->source];
  const Endpoint& target = *endpoints_[message->target];
  const auto cut = cuts_.find(both(source.rank, target.rank));
  if (cut == cuts_.end() || cut->second <= now_) return false;
  if (duplicate) return true;  // a copy that meets a cut is lost
  if (message->first_refused < 0) message->first_refused = now_;
  const int64_t given_up = message->first_refused + options.retry_ns;
  if (options.retry_ns != 0 && cut->second > given_up) {
    at(std::max(now_, given_up), [this, message] {
      lose(message, "no answer for " + std::to_string(options.retry_ns) + " ns");
    });
  } else if (cut->second != Network::kForever) {
    at(cut->second, [this, message] { arrive(message, false); });
  }
  return true;
}

void State::enter_queue(Rail& rail, Inbound inbound) {
  inbound.time = now_;
  inbound.order = order_++;
  const MessagePtr message = inbound.message;
  const bool duplicate = inbound.duplicate;
  ++rail.queued;
  rail.inbound.push_back(std::move(inbound));
  if (duplicate) return;
  if (message->plan.completes_early) schedule_completion(message);
  if (message->plan.duplicated) {
    at(now_ + message->plan.duplicate_delay, [this, message] { arrive(message, true); });
  }
}

void State::leave_queue(Endpoint& target, Rail& rail) {
  --rail.queued;
  if (rail.waiting.empty()) return;
  Inbound next = std::move(rail.waiting.front());
  rail.waiting.pop_front();
  enter_queue(rail, std::move(next));
  if (options.lands_without_poll) land_without_poll(target);
}

// --- Landing ----------------------------------------------------------------------------------

void State::land_without_poll(Endpoint& target) {
  for (Rail& rail : target.rails) {
    if (rail.stalled_until > now_) continue;
    // Arrivals land in order, so those that have not landed are at the end.
    size_t first = rail.inbound.size();
    while (first > 0 && !rail.inbound[first - 1].landed) --first;
    for (size_t i = first; i < rail.inbound.size(); ++i) {
      Inbound& inbound = rail.inbound[i];
      if (land(inbound) && inbound.duplicate) ++inbound.message->unreported_duplicates;
    }
  }
}

bool State::land(Inbound& inbound) {
  Message& message = *inbound.message;
  // What a dead source has not copied is gone. A duplicate does not land after the completion.
  if (message.lost || (!endpoints_[message.source]->open && !message.copied)) return false;
  if (inbound.duplicate && message.completed) return false;
  inbound.landed = true;
  if (inbound.piece >= 0) {
    land_piece(message, inbound.piece);
    return false;
  }
  land_whole(message, inbound.duplicate);
  schedule_completion(inbound.message);
  return true;
}

void State::land_piece(Message& message, int64_t piece) {
  const int64_t begin = piece * message.piece_bytes;
  const int64_t bytes = std::min(message.piece_bytes, message.write.bytes - begin);
  const std::byte* const from = message.copied ? message.copy.data() : message.from;
  copy_into(message.to + begin, from + begin, bytes, false);
  message.pieces[static_cast<size_t>(piece)] = true;
  ++counters_.pieces_landed;
}

void State::land_whole(Message& message, bool duplicate) {
  const int64_t bytes = message.write.bytes;
  const std::byte* const from = message.copied ? message.copy.data() : message.from;
  if (duplicate || message.pieces.empty()) {
    copy_into(message.to, from, bytes, duplicate);
  } else {
    for (size_t piece = 0; piece < message.pieces.size(); ++piece) {
      if (!message.pieces[piece]) land_piece(message, static_cast<int64_t>(piece));
    }
  }
  message.landed = true;
  if (duplicate) {
    ++counters_.duplicates_landed;
  } else {
    ++counters_.landed;
    counters_.bytes_landed += bytes;
  }
}

// --- Completion -------------------------------------------------------------------------------

void State::read_source(Message& message) {
  if (message.copied) return;
  message.copied = true;
  if (message.write.bytes > 0) {
    message.copy.assign(message.from, message.from + message.write.bytes);
  }
}

void State::schedule_completion(const MessagePtr& message) {
  if (message->completion_scheduled) return;
  message->completion_scheduled = true;
  at(now_ + message->plan.completion_delay, [this, message] {
    if (lost(*message)) return;
    endpoints_[message->source]->completions.push_back({now_, order_++, message});
  });
}

// --- Polls ------------------------------------------------------------------------------------

namespace {

constexpr int32_t kNothing = -2;
constexpr int32_t kCompletion = -1;  // otherwise the number of a rail

}  // namespace

int32_t State::poll(size_t id, std::span<Event> events, std::string& error) {
  Endpoint& endpoint = *endpoints_[id];
  advance(options.poll_ns);
  if (!endpoint.failure.empty()) {
    error = endpoint.failure;
    return 0;
  }
  size_t count = 0;
  while (count < events.size() && !endpoint.failed_peers.empty()) {
    const int32_t peer = endpoint.failed_peers.front();
    endpoint.failed_peers.pop_front();
    if (count == 0) error.clear();
    error.append(count == 0 ? "" : "; ").append(endpoint.channels.at(peer).failure);
    events[count++] = Event{
        .kind = EventKind::kPeerFailed, .rail = -1, .peer = peer, .immediate = 0, .context = 0};
  }
  for (int32_t ready = next_ready(endpoint); ready != kNothing; ready = next_ready(endpoint)) {
    const bool is_piece =
        ready >= 0 && endpoint.rails[static_cast<size_t>(ready)].inbound.front().piece >= 0;
    if (count == events.size() && !is_piece) break;
    Event unused{};
    Event& event = is_piece ? unused : events[count];
    const bool reported =
        ready == kCompletion ? report_completion(endpoint, event) : report(endpoint, ready, event);
    if (reported) ++count;
  }
  return static_cast<int32_t>(count);
}

// What became ready first: the completions, or a rail that is not stalled.
int32_t State::next_ready(const Endpoint& endpoint) const {
  int32_t ready = kNothing;
  std::pair<int64_t, uint64_t> earliest{INT64_MAX, UINT64_MAX};
  if (!endpoint.completions.empty()) {
    const Completion& first = endpoint.completions.front();
    // The target still has to report that it landed again.
    if (first.message->unreported_duplicates == 0) {
      ready = kCompletion;
      earliest = {first.time, first.order};
    }
  }
  for (int32_t rail = 0; rail < options.rails; ++rail) {
    const Rail& each = endpoint.rails[static_cast<size_t>(rail)];
    if (each.inbound.empty() || each.stalled_until > now_) continue;
    const Inbound& first = each.inbound.front();
    if (std::pair(first.time, first.order) > earliest) continue;
    ready = rail;
    earliest = {first.time, first.order};
  }
  return ready;
}

bool State::report_completion(Endpoint& source, Event& event) {
  const MessagePtr message = std::move(source.completions.front().message);
  source.completions.pop_front();
  if (lost(*message)) return false;
  // From here on the caller may change the source.
  if (!message->landed) read_source(*message);
  message->completed = true;
  const auto rail = static_cast<size_t>(message->write.rail);
  --source.rails[rail].in_flight;
  --source.channels.at(message->write.peer).in_flight[rail];
  event = Event{.kind = EventKind::kCompletion,
                .rail = message->write.rail,
                .peer = -1,
                .immediate = 0,
                .context = message->write.context};
  return true;
}

bool State::report(Endpoint& endpoint, int32_t number, Event& event) {
  Rail& rail = endpoint.rails[static_cast<size_t>(number)];
  Inbound inbound = std::move(rail.inbound.front());
  rail.inbound.pop_front();
  const bool landed_before = inbound.landed;
  const bool reports = landed_before ? inbound.piece < 0 : land(inbound);
  if (inbound.piece >= 0) return false;
  leave_queue(endpoint, rail);
  if (!reports) return false;
  if (landed_before && inbound.duplicate) --inbound.message->unreported_duplicates;
  int32_t peer = -1;
  for (const auto& [each, channel] : endpoint.channels) {
    if (options.arrivals_name_peer && channel.target == inbound.message->source) peer = each;
  }
  event = Event{.kind = EventKind::kArrival,
                .rail = number,
                .peer = peer,
                .immediate = inbound.message->write.immediate,
                .context = 0};
  return true;
}

// --- Failures ---------------------------------------------------------------------------------

bool State::lost(const Message& message) const {
  const Endpoint& source = *endpoints_[message.source];
  return message.lost || !source.open || !source.channels.at(message.write.peer).failure.empty();
}

void State::lose(const MessagePtr& message, const std::string& why) {
  if (lost(*message)) return;
  message->lost = true;
  const int32_t peer = message->write.peer;
  at(now_ + options.detect_ns, [this, id = message->source, peer, why] {
    fail_peer(id, peer, "peer " + std::to_string(peer) + " is lost: " + why);
  });
}

// Its writes to this peer never complete; they no longer count as in flight.
void State::fail_peer(size_t id, int32_t peer, const std::string& why) {
  Endpoint& endpoint = *endpoints_[id];
  Channel& channel = endpoint.channels.at(peer);
  if (!endpoint.open || !channel.failure.empty()) return;
  channel.failure = why;
  for (size_t rail = 0; rail < endpoint.rails.size(); ++rail) {
    endpoint.rails[rail].in_flight -= channel.in_flight[rail];
    channel.in_flight[rail] = 0;
  }
  endpoint.failed_peers.push_back(peer);
}

void State::stall(int32_t rank, int32_t rail, int64_t ns) {
  const int64_t until = now_ + ns;
  for (const auto& endpoint : endpoints_) {
    if (endpoint->rank != rank) continue;
    for (int32_t each = 0; each < options.rails; ++each) {
      int64_t& stalled_until = endpoint->rails[static_cast<size_t>(each)].stalled_until;
      if (rail == -1 || rail == each) stalled_until = std::max(stalled_until, until);
    }
    if (!options.lands_without_poll) continue;
    at(until, [this, &stalled = *endpoint] { land_without_poll(stalled); });
  }
}

void State::cut(int32_t rank, int32_t peer, int64_t ns) {
  int64_t& until = cuts_.try_emplace(both(rank, peer), 0).first->second;
  until = std::max(until, ns == Network::kForever ? ns : now_ + ns);
}

void State::kill(int32_t rank) {
  for (size_t dead = 0; dead < endpoints_.size(); ++dead) {
    if (endpoints_[dead]->rank != rank) continue;
    endpoints_[dead]->failure = "rank " + std::to_string(rank) + " was killed";
    close(dead);
    for (size_t id = 0; id < endpoints_.size(); ++id) {
      for (const auto& [peer, channel] : endpoints_[id]->channels) {
        if (channel.target != dead) continue;
        at(now_ + options.detect_ns, [this, id, number = peer] {
          fail_peer(id, number, "peer " + std::to_string(number) + " is lost: it has died");
        });
      }
    }
  }
}

}  // namespace fanfold::transport::loopback
