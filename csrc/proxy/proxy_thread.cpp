#include "proxy/proxy_thread.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/wait.h"

namespace fanfold::proxy {
namespace {

using std::chrono::nanoseconds;
using transport::Code;

// Bounds of one step.
constexpr int kCommands = 128;
constexpr int kMessagesOfChannel = 32;

// Between two steps no more time passes than this: a longer gap means that the process was
// suspended, perhaps together with its peers.
constexpr nanoseconds kLongestGap = std::chrono::seconds(1);

// The target of what is not written to the peer's memory.
constexpr int64_t kNowhere = INT64_MIN / 2;

SpanLimits limits_for(const ProxyOptions& options, const ImmediateLayout& layout,
                      const transport::Limits& transport) {
  return {.part_bytes = options.part_bytes,
          .message_bytes = std::min(options.message_bytes, transport.write_bytes),
          .message_parts = layout.most_amount(),
          .rails = transport.rails};
}

}  // namespace

ProxyThread::ProxyThread(const ProxyOptions& options, int32_t index, const ProxyMemory& memory,
                         std::unique_ptr<transport::Transport> transport)
    : options_(options), index_(index), memory_(memory), transport_(std::move(transport)),
      layout_(ImmediateLayout::of(options.ranks)),
      limits_(limits_for(options, layout_, transport_->limits())),
      rings_(options.ring_slots, options.kernel_ring_slots) {
  check_limits(limits_);
  const int32_t places = (options.ranks - index + options.threads - 1) / options.threads;
  channels_.resize(static_cast<size_t>(std::max(places, 0)));
  stored_.resize(2 * channels_.size() * kMostInFlight);
  local_ = register_memory(memory.data, memory.bytes);
  if (channels_.empty()) return;
  local_stored_ = register_memory(reinterpret_cast<std::byte*>(stored_.data()),
                                  static_cast<int64_t>(stored_.size() * sizeof(StoredWord)));
}

transport::LocalMemory ProxyThread::register_memory(std::byte* data, int64_t bytes) {
  const transport::LocalMemory local = transport_->register_memory(data, bytes);
  if (local.index >= 0) return local;
  raise(describe(FailureReason::kTransport, -1, unregistered(bytes)));
}

std::string ProxyThread::unregistered(int64_t bytes) const {
  return "cannot register " + std::to_string(bytes) + " bytes of memory: " + transport_->error();
}

void ProxyThread::register_rows(const RowsMemory& rows) {
  if (rows.device < 0) {
    local_rows_ = transport_->register_memory(rows.data, rows.bytes);
  } else {
    transport::GpuMemory memory{
        .data = rows.data, .bytes = rows.bytes, .device = rows.device, .dmabuf = rows.dmabuf};
    local_rows_ = transport_->register_gpu_memory(memory);
    if (local_rows_.index < 0 && memory.dmabuf >= 0) {
      // Where the kernel knows no dmabuf, the NIC's driver may still find the pages.
      memory.dmabuf = -1;
      local_rows_ = transport_->register_gpu_memory(memory);
    }
  }
  // What has failed until here ends nothing: without it rows lie beside the words.
  known_error_ = transport_->error();
  if (local_rows_.index < 0) throw Unavailable(unregistered(rows.bytes));
  rows_bytes_ = rows.bytes;
  rows_sources_ = rows.sources;
  rows_sources_.resize(static_cast<size_t>(options_.ranks));
}

int64_t ProxyThread::source_span(const CommandFields& fields) const {
  if (!is_apart(fields.source)) return source_of(static_cast<int32_t>(fields.peer)) + fields.source;
  return kRowsSpan + rows_sources_[static_cast<size_t>(fields.peer)] + within(fields.source);
}

int64_t ProxyThread::target_span(const CommandFields& fields) const {
  return (is_apart(fields.target) ? kRowsSpan : 0) + within(fields.target);
}

ThreadAddress ProxyThread::address() const {
  const auto remote = [this](transport::LocalMemory local) {
    return local.index < 0 ? transport::RemoteMemory{} : transport_->remote(local);
  };
  return {.address = transport_->address(),
          .memory = remote(local_),
          .inbox = remote(local_stored_),
          .rows = remote(local_rows_)};
}

int64_t ProxyThread::inbox_place(int32_t source, uint64_t sequence) const {
  return (source / options_.threads) * kMostInFlight +
         static_cast<int64_t>(sequence % kMostInFlight);
}

int64_t ProxyThread::outbox_place(int32_t peer, uint64_t sequence) const {
  return static_cast<int64_t>(channels_.size()) * kMostInFlight + inbox_place(peer, sequence);
}

void ProxyThread::connect(int32_t peer, const ThreadAddress& address, const Credit& theirs) {
  if (transport_->connect(peer, address.address) != Code::kOk) {
    raise(describe(FailureReason::kTransport, peer, "cannot connect: " + transport_->error()));
  }
  limits_.message_bytes = std::min(limits_.message_bytes, theirs.bytes);
  check_limits(limits_);
  channels_[place(peer)] = std::make_unique<Channel>(
      peer, theirs, options_.credit, layout_.acknowledgement_bits(), options_.first_sequence);
  channel_of(peer).path = transport_->path(peer);
  channel_of(peer).target = address.memory;
  channel_of(peer).inbox = address.inbox;
  channel_of(peer).rows = address.rows;
  peers_.push_back(peer);
}

bool ProxyThread::serves(int32_t peer) const {
  return peer >= 0 && peer < options_.ranks && peer % options_.threads == index_ &&
         channels_[place(peer)] != nullptr;
}

Stats ProxyThread::stats() const {
  Stats sum = counted_.snapshot();
  for (const int32_t peer : peers_) sum += stats_of(peer);
  return sum;
}

Stats ProxyThread::stats_of(int32_t peer) const {
  const Channel* found = channel(peer);
  return found == nullptr ? Stats{} : found->counted.snapshot();
}

bool ProxyThread::outstanding() const {
  return failure() == nullptr &&
         (held_ || pending_ > 0 || in_flight_ > 0 || acks_in_flight_ > 0 || !news_.empty());
}

bool ProxyThread::step(Time now) {
  if (failure() != nullptr) return false;
  elapsed_ += std::clamp<nanoseconds>(now - last_.value_or(now), nanoseconds(0), kLongestGap);
  last_ = now;
  grown_ = false;
  if (probe_.load(std::memory_order_relaxed) >= 0) {
    send_probe(probe_.exchange(-1, std::memory_order_relaxed));
  }
  bool worked = poll();
  worked = take_commands() || worked;
  worked = send_pending() || worked;
  worked = finish_held() || worked;
  worked = acknowledge() || worked;
  if (failure() == nullptr) check_timeouts();
  if (grown_ && memory_.bell != nullptr) fanfold::ring(*memory_.bell);
  return worked;
}

// ---- sending ------------------------------------------------------------------------------------

bool ProxyThread::take_commands() {
  int taken = 0;
  while (taken < kCommands && failure() == nullptr) {
    if (!held_) {
      Command command{};
      if (!rings_.pop(command)) {
        ring_empty_ = elapsed_;
        break;
      }
      counted_.add(&Stats::commands);
      counted_.add(&Stats::ring_ns, static_cast<uint64_t>((elapsed_ - ring_empty_).count()));
      ++taken;
      held_ = command.fields();
      behind_barrier_ =
          held_->kind == CommandKind::kBarrier || (behind_barrier_ && !has_peer(held_->kind));
    }
    if (!take(*held_)) break;
    held_.reset();
  }
  // A command that is held is not done, so its slot stays occupied and its ticket waits.
  rings_.publish(held_.has_value());
  return taken > 0;
}

// Puts the command into its channel. Returns false if it has to be held.
bool ProxyThread::take(const CommandFields& fields) {
  if (const std::optional<BadArgument> wrong = refusal(fields)) {
    fail(FailureReason::kCommand, static_cast<int32_t>(fields.peer),
         std::string("a command's ") + wrong->what());
    return false;
  }
  if (fields.kind == CommandKind::kNone) return true;
  if (fields.kind == CommandKind::kFence || fields.kind == CommandKind::kBarrier) return false;
  Channel& channel = channel_of(static_cast<int32_t>(fields.peer));
  if (channel.given_up) {
    channel.counted.add(&Stats::dropped);
    return true;
  }
  const auto counter = static_cast<int32_t>(fields.counter);
  Pending pending;
  pending.kind = fields.kind;
  if (fields.kind == CommandKind::kSignal) {
    pending.counter = counter;
    pending.amount = static_cast<uint32_t>(fields.amount);
  } else if (fields.kind == CommandKind::kStore) {
    pending.stored = {.offset = fields.target, .word = fields.word};
  } else {
    pending.span = {.counter = counter,
                    .source_offset = source_span(fields),
                    .target_offset = target_span(fields),
                    .bytes = fields.bytes,
                    .parts = parts_of(fields.bytes, options_.part_bytes)};
    Pending* last = channel.pending.empty() ? nullptr : &channel.pending.back();
    if (last != nullptr && last->kind == CommandKind::kWrite && last->each == 0 &&
        coalesce(last->span, pending.span, limits_)) {
      channel.counted.add(&Stats::coalesced);
      return true;
    }
  }
  if (channel.pending.full()) return false;
  enqueue(channel, pending);
  return true;
}

void ProxyThread::enqueue(Channel& channel, const Pending& pending) {
  if (!channel.busy()) channel.moved = elapsed_;
  channel.pending.push(pending);
  channel.pending.back().taken = elapsed_;
  ++pending_;
  if (!std::exchange(channel.in_sending, true)) sending_.push_back(channel.peer);
}

std::optional<BadArgument> ProxyThread::refusal(const CommandFields& fields) const {
  if (fields.kind > CommandKind::kStore) {
    return BadArgument("kind", std::to_string(static_cast<uint32_t>(fields.kind)), "a CommandKind");
  }
  if (!has_peer(fields.kind)) return {};
  if (!serves(static_cast<int32_t>(fields.peer))) {
    return BadArgument("peer", std::to_string(fields.peer),
                       "another rank below " + std::to_string(options_.ranks) +
                           " whose number modulo " + std::to_string(options_.threads) + " is " +
                           std::to_string(index_));
  }
  if (fields.counter >= kBarrierCounter) {
    return BadArgument("counter", std::to_string(fields.counter),
                       "below " + std::to_string(kBarrierCounter) + ", which counts barriers");
  }
  if (fields.kind == CommandKind::kSignal) {
    if (fields.amount > 0) return {};
    return BadArgument("amount", std::to_string(fields.amount), "at least 1");
  }
  const auto peer = static_cast<int32_t>(fields.peer);
  const bool store = fields.kind == CommandKind::kStore;
  const Channel& channel = *channels_[place(peer)];
  const int64_t bytes = store ? int64_t{sizeof(fields.word)} : fields.bytes;
  const auto inside = [&](int64_t memory) {
    return "at most " + std::to_string(memory - bytes) + ", where its " + std::to_string(bytes) +
           " bytes end within the memory of " + std::to_string(memory);
  };
  const int64_t local = is_apart(fields.source)
                            ? rows_bytes_ - rows_sources_[static_cast<size_t>(peer)]
                            : memory_.bytes - source_of(peer);
  if (within(fields.source) > local - fields.bytes) {
    return BadArgument("source", std::to_string(fields.source), inside(local));
  }
  const bool apart = !store && is_apart(fields.target);
  const int64_t remote = (apart ? channel.rows : channel.target).bytes;
  if ((apart ? within(fields.target) : fields.target) > remote - bytes) {
    return BadArgument("target", std::to_string(fields.target), inside(remote));
  }
  return {};
}

bool ProxyThread::send_pending() {
  bool worked = false;
  size_t kept = 0;
  bool room = true;
  for (const int32_t peer : sending_) {
    Channel& channel = channel_of(peer);
    if (room && failure() == nullptr) {
      const uint64_t before = channel.out.next();
      room = send(channel) != Sent::kRoom;
      worked = worked || channel.out.next() != before;
    }
    channel.in_sending = !channel.pending.empty();
    if (channel.in_sending) sending_[kept++] = peer;
  }
  sending_.resize(kept);
  // Another channel comes first next time, so that none starves if the transport has little room.
  if (!room && kept > 1) std::rotate(sending_.begin(), sending_.begin() + 1, sending_.end());
  return worked;
}

ProxyThread::Sent ProxyThread::send(Channel& channel) {
  if (channel.failure != nullptr) {
    stop_for(channel, channel.failure->reason, channel.failure->text);
    return Sent::kFailed;
  }
  for (int sent = 0; sent < kMessagesOfChannel && !channel.pending.empty(); ++sent) {
    Pending& first = channel.pending.front();
    Span rest = first.span;
    Message message{.source = local_, .target = channel.target, .immediate = {}};
    message.immediate.source = options_.rank;
    switch (first.kind) {
      case CommandKind::kSignal:
        message.immediate.kind = ImmediateKind::kSignal;
        message.immediate.counter = first.counter;
        message.immediate.amount = std::min(first.amount, layout_.most_amount());
        break;
      case CommandKind::kStore:
        message = message_of(channel, first.stored);
        break;
      default:
        if (first.each == 0) first.each = parts_each(rest, limits_);
        message.span = split(rest, first.each, limits_.part_bytes);
        if (message.span.source_offset >= kRowsSpan) message.source = local_rows_;
        if (message.span.target_offset >= kRowsSpan) message.target = channel.rows;
        message.immediate.kind = ImmediateKind::kData;
        message.immediate.counter = message.span.counter;
        message.immediate.amount = static_cast<uint32_t>(message.span.parts);
        break;
    }
    const Sent outcome = send_message(channel, message);
    if (outcome != Sent::kAll) return outcome;
    count_time(channel, &Stats::queue_ns, first.taken);
    first.span = rest;
    if (first.kind == CommandKind::kSignal) first.amount -= message.immediate.amount;
    if (rest.parts > 0 || first.amount > 0) continue;
    channel.pending.pop();
    --pending_;
  }
  return Sent::kAll;
}

// Its place in the outbox belongs to the next sequence number, so that it is free.
ProxyThread::Message ProxyThread::message_of(const Channel& channel, const StoredWord& stored) {
  const uint64_t sequence = channel.out.next();
  const auto bytes = int64_t{sizeof(StoredWord)};
  const int64_t source = outbox_place(channel.peer, sequence);
  const Span span{.counter = 0,
                  .source_offset = source * bytes,
                  .target_offset = inbox_place(options_.rank, sequence) * bytes,
                  .bytes = bytes,
                  .parts = 0};
  const Immediate immediate{.kind = ImmediateKind::kStore,
                            .source = options_.rank,
                            .counter = 0,
                            .sequence = 0,
                            .amount = 1};
  if (channel.out.admits(bytes)) stored_[static_cast<size_t>(source)] = stored;
  return {.source = local_stored_, .target = channel.inbox, .span = span, .immediate = immediate};
}

ProxyThread::Sent ProxyThread::send_message(Channel& channel, const Message& message) {
  const Span& span = message.span;
  const bool data = message.immediate.kind == ImmediateKind::kData;
  if (!channel.out.admits(span.bytes) ||
      (data && channel.out.writes_to(span.target_offset, span.bytes))) {
    if (!std::exchange(channel.stalled, true)) channel.counted.add(&Stats::stalls);
    return Sent::kCredit;
  }
  channel.stalled = false;
  Immediate numbered = message.immediate;
  numbered.sequence =
      static_cast<uint32_t>(channel.out.next()) & ((uint32_t{1} << kSequenceBits) - 1);
  const EncodedImmediate encoded = layout_.encode(numbered);
  if (!encoded.fits) throw Misuse("a message's fields do not fit into its immediate");
  transport::Write request{
      .peer = channel.peer,
      .rail = next_rail_,
      .source = message.source,
      .source_offset = span.source_offset % kRowsSpan,
      .target = message.target,
      .target_offset = span.target_offset % kRowsSpan,
      .bytes = span.bytes,
      .immediate = encoded.word,
      .context = context_of(channel.peer) | static_cast<uint32_t>(channel.out.next())};
  const Code code = write(request);
  if (code == Code::kAgain) return Sent::kRoom;
  if (code == Code::kFailed) {
    stop_for(channel, FailureReason::kPeer, transport_->error());
    return Sent::kFailed;
  }
  next_rail_ = (request.rail + 1) % limits_.rails;
  // Words of stores have places of their own, so nothing is written twice there.
  channel.when_sent(channel.out.next()) = elapsed_;
  channel.out.post(span.bytes, data ? span.target_offset : kNowhere);
  ++in_flight_;
  channel.counted.add(&Stats::messages);
  channel.counted.add(&Stats::bytes, static_cast<uint64_t>(span.bytes));
  channel.counted.add(&Stats::parts, static_cast<uint64_t>(span.parts));
  return Sent::kAll;
}

// Starts the write on the first rail from `write.rail` on that has room.
Code ProxyThread::write(transport::Write& write) {
  Code code = Code::kAgain;
  for (int32_t tried = 0; tried < limits_.rails && code == Code::kAgain; ++tried) {
    if (tried > 0) write.rail = (write.rail + 1) % limits_.rails;
    code = transport_->write(write);
  }
  if (code == Code::kAgain) channel_of(write.peer).counted.add(&Stats::retries);
  return code;
}

}  // namespace fanfold::proxy
