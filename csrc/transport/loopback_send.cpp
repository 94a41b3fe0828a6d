// The sending side of the loopback network.
#include <algorithm>

#include "transport/loopback_state.h"

namespace fanfold::transport::loopback {
namespace {

constexpr int64_t kMostPieces = 64;

std::string range_text(int64_t offset, int64_t bytes, int64_t of) {
  return std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
         " are not within the " + std::to_string(of) + " registered bytes";
}

bool outside(int64_t offset, int64_t bytes, int64_t of) {
  return offset < 0 || offset > of || bytes > of - offset;
}

}  // namespace

// Empty if the write is in bounds.
std::string State::wrong_with(const Endpoint& source, const Write& write) const {
  const auto channel = source.channels.find(write.peer);
  if (channel == source.channels.end()) {
    return "peer " + std::to_string(write.peer) + " was never connected";
  }
  if (write.rail < 0 || write.rail >= options.rails) {
    return "rail is " + std::to_string(write.rail) + ", but there are " +
           std::to_string(options.rails) + " rails";
  }
  if (write.bytes < 0 || write.bytes > options.write_bytes) {
    return "a write has " + std::to_string(write.bytes) + " bytes, but must have between 0 and " +
           std::to_string(options.write_bytes);
  }
  if (write.bytes == 0) return {};
  const auto memories = static_cast<int32_t>(source.memories.size());
  if (write.source.index < 0 || write.source.index >= memories) {
    return "source memory " + std::to_string(write.source.index) + " is none of the " +
           std::to_string(memories) + " that are registered";
  }
  const Memory& memory = source.memories[static_cast<size_t>(write.source.index)];
  if (outside(write.source_offset, write.bytes, memory.bytes)) {
    return "source: " + range_text(write.source_offset, write.bytes, memory.bytes);
  }
  return wrong_target(*endpoints_[channel->second.target], write);
}

std::string State::wrong_target(const Endpoint& target, const Write& write) const {
  const auto memory =
      std::find_if(target.memories.begin(), target.memories.end(),
                   [&](const Memory& each) { return each.key == write.target.key; });
  if (memory == target.memories.end()) {
    return "target: peer " + std::to_string(write.peer) + " has no memory with key " +
           std::to_string(write.target.key);
  }
  if (write.target.base != reinterpret_cast<uintptr_t>(memory->data)) {
    return "target: base " + std::to_string(write.target.base) + " is not that of key " +
           std::to_string(write.target.key);
  }
  if (outside(write.target_offset, write.bytes, memory->bytes)) {
    return "target: " + range_text(write.target_offset, write.bytes, memory->bytes) + " of peer " +
           std::to_string(write.peer);
  }
  return {};
}

bool State::has_room(Endpoint& source, const Write& write) {
  const auto attempt = static_cast<uint64_t>(++source.attempts);
  if (source.rails[static_cast<size_t>(write.rail)].in_flight >= options.writes) return false;
  const uint64_t place =
      (uint64_t{static_cast<uint32_t>(source.rank)} << 32) | static_cast<uint32_t>(source.thread);
  return !Draw(Draw::mix(options.seed ^ Draw::mix(place)) + attempt).one_in(options.again_one_in);
}

const WriteError* State::write_error(const Endpoint& source) const {
  for (const WriteError& error : options.write_errors) {
    if (error.rank == source.rank && error.thread == source.thread &&
        error.number == source.writes) {
      return &error;
    }
  }
  return nullptr;
}

Code State::write(size_t id, const Write& write, std::string& error) {
  Endpoint& source = *endpoints_[id];
  if (source.failure.empty()) source.failure = wrong_with(source, write);
  if (!source.failure.empty()) {
    error = source.failure;
    return Code::kFailed;
  }
  Channel& channel = source.channels.at(write.peer);
  if (!channel.failure.empty()) {
    error = channel.failure;
    return Code::kFailed;
  }
  if (!has_room(source, write)) {
    ++counters_.again;
    return Code::kAgain;
  }
  ++source.writes;
  const WriteError* const met = write_error(source);
  if (met != nullptr && met->at_once) {
    error = source.failure =
        "write " + std::to_string(source.writes) + " met an error of the provider";
    return Code::kFailed;
  }
  if (met != nullptr) {
    const std::string why = "write " + std::to_string(source.writes) + " to peer " +
                            std::to_string(write.peer) + " met an error of the provider";
    at(now_ + options.detect_ns, [this, id, peer = write.peer, why] { fail_peer(id, peer, why); });
    ++channel.in_flight[static_cast<size_t>(write.rail)];
    ++source.rails[static_cast<size_t>(write.rail)].in_flight;
    return Code::kOk;
  }
  send(id, channel, write);
  return Code::kOk;
}

void State::send(size_t id, Channel& channel, const Write& write) {
  Endpoint& source = *endpoints_[id];
  Endpoint& target = *endpoints_[channel.target];
  const auto rail = static_cast<size_t>(write.rail);
  auto message = std::make_shared<Message>();
  message->write = write;
  message->source = id;
  message->target = channel.target;
  message->plan = plan_write(options, {.source_rank = source.rank,
                                       .source_thread = source.thread,
                                       .target_rank = target.rank,
                                       .target_thread = target.thread,
                                       .number = channel.writes++});
  if (write.bytes > 0) {
    message->from =
        source.memories[static_cast<size_t>(write.source.index)].data + write.source_offset;
    // Where no provider runs, an offset into the peer's memory is a pointer of this process.
    message->to = reinterpret_cast<std::byte*>(write.target.base) + write.target_offset;
  }
  ++counters_.writes;
  ++channel.in_flight[rail];
  ++source.rails[rail].in_flight;
  const Plan& plan = message->plan;
  if (plan.read_at_write) read_source(*message);
  if (plan.stalls) {
    ++counters_.stalls;
    stall(target.rank, plan.stalls_all_rails ? -1 : write.rail, plan.stall);
  }
  if (options.link.bytes_per_us != 0) {
    start_train(message);
  } else {
    int64_t time = now_ + plan.delay;
    if (options.in_order) time = std::max(time, channel.last_arrival[rail]);
    channel.last_arrival[rail] = time;
    schedule_arrival(message, time);
  }
  if (plan.completes_early && options.receive_queue == 0) schedule_completion(message);
}

// The pieces land before the immediate, at times of their own.
void State::schedule_arrival(const MessagePtr& message, int64_t time) {
  const int64_t bytes = message->write.bytes;
  if (options.piece_bytes != 0 && bytes > options.piece_bytes) {
    message->piece_bytes = std::max(options.piece_bytes, (bytes + kMostPieces - 1) / kMostPieces);
    const int64_t pieces = (bytes + message->piece_bytes - 1) / message->piece_bytes;
    message->pieces.resize(static_cast<size_t>(pieces));
    Draw draw(message->plan.pieces_key);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      at(draw.between(now_, time), [this, message, piece] {
        Endpoint& target = *endpoints_[message->target];
        if (lost(*message) || !target.open) return;
        target.rails[static_cast<size_t>(message->write.rail)].inbound.push_back(
            {now_, order_++, message, piece, false, false});
        if (options.lands_without_poll) land_without_poll(target);
      });
    }
  }
  at(time, [this, message] { arrive(message, false); });
}

// --- Links ------------------------------------------------------------------------------------

Link& State::link(bool outgoing, const Endpoint& endpoint, int32_t rail) {
  auto& links = outgoing ? outgoing_ : incoming_;
  return links.try_emplace({endpoint.rank, rail}, options.link).first->second;
}

// Sends the packets from `next_packet` on.
void State::start_train(const MessagePtr& message) {
  if (lost(*message)) return;
  message->train_broken = false;
  ++message->train;
  const int64_t first = message->next_packet;
  const int64_t packets = Link::packets(options.link, message->write.bytes);
  Link& outgoing = link(true, *endpoints_[message->source], message->write.rail);
  const int64_t start_ps = std::max(outgoing.free_ps(), now_ * 1000);
  outgoing.reserve(now_, Link::wire_bytes(options.link, message->write.bytes, first, packets));
  const int64_t packet_ps =
      outgoing.occupied_ps(Link::wire_bytes(options.link, message->write.bytes, first, first + 1));
  at((start_ps + packet_ps + 999) / 1000 + message->plan.delay,
     [this, message, train = message->train, first, start_ps] {
       pass_packet(message, train, first, start_ps);
     });
}

// A packet meets the queue of the target's link. `start_ps` is when it began to leave the source.
void State::pass_packet(const MessagePtr& message, int32_t train, int64_t packet,
                        int64_t start_ps) {
  if (lost(*message) || train != message->train) return;
  const int64_t bytes = message->write.bytes;
  const int64_t packets = Link::packets(options.link, bytes);
  Link& incoming = link(false, *endpoints_[message->target], message->write.rail);
  const auto occupied_ps = [&](int64_t number) {
    return incoming.occupied_ps(Link::wire_bytes(options.link, bytes, number, number + 1));
  };
  ++counters_.packets;
  const auto leaves =
      incoming.enqueue(now_, Link::wire_bytes(options.link, bytes, packet, packet + 1));
  counters_.most_queued_bytes = std::max(counters_.most_queued_bytes, incoming.queued(now_));
  if (!leaves) {
    ++counters_.packets_dropped;
    if (!message->train_broken) {
      message->train_broken = true;
      at(now_ + options.link.retransmit_ns, [this, message] { start_train(message); });
    }
  } else if (message->train_broken) {
    ++counters_.packets_useless;
  } else {
    message->next_packet = packet + 1;
    if (packet + 1 == packets) schedule_arrival(message, *leaves);
  }
  if (packet + 1 == packets) return;
  const int64_t next_ps = start_ps + occupied_ps(packet);
  at((next_ps + occupied_ps(packet + 1) + 999) / 1000 + message->plan.delay,
     [this, message, train, packet, next_ps] { pass_packet(message, train, packet + 1, next_ps); });
}

}  // namespace fanfold::transport::loopback
