#include "host/exchange.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>

namespace fanfold {
namespace {

// A waiting rank counts its heartbeat up about every 50 ms. A rank whose count has stood still for
// this many polls is stuck.
constexpr int32_t kMissedHeartbeats = 3;
constexpr auto kHeartbeatInterval = std::chrono::milliseconds(50);
constexpr int32_t kNobody = -1;

// The values of heartbeats.
constexpr int32_t kWaitsForNobody = 0;
int32_t waits_for(int32_t peer) { return peer + 1; }
int32_t gave_up_for(int32_t peer) { return -(peer + 1); }

constexpr Phase kPhases[] = {Phase::kHighThroughputCounts, Phase::kHighThroughputDispatch,
                             Phase::kHighThroughputCombine};

}  // namespace

Exchange::Exchange(SymmetricMemory& memory, int64_t offset, int64_t bytes, uint32_t epoch)
    : memory_(memory), offset_(offset), signals_{memory.ranks()}, layout_{memory.ranks()},
      staging_bytes_(bytes - layout_.staging_offset()), epoch_(epoch),
      header_received_(index(memory.ranks())), heartbeats_(index(memory.ranks())) {
  if (offset < 0 || offset + bytes > memory.bytes() || staging_bytes_ <= 0) {
    throw BadArgument(
        "bytes", std::to_string(bytes),
        "above " + std::to_string(layout_.staging_offset()) + " and within the symmetric memory");
  }
}

void Exchange::push(Kind kind, int32_t peer, int32_t value) const {
  memory_.peer(peer).signal(signal(kind, memory_.rank()), Signal{epoch_, value});
}

// --- The course of a call -------------------------------------------------------------------

void Exchange::begin(Phase phase) {
  memory_.check_usable();
  if (within_call_) {
    throw Misuse("an earlier high-throughput call was interrupted before its end; close it");
  }
  phase_ = phase;
  // A peer that is one call ahead has left this call as well.
  const auto left = [&](int32_t peer) {
    const Signal signal = peek(Kind::kAck, peer);
    return !present(peer) || peer == rank() || !any_call_ ||
           (signal.epoch == epoch_ && signal.value == kLeft) || signal.epoch == epoch_ + 1;
  };
  const auto all_left = [&] {
    for (int32_t peer = 0; peer < ranks(); ++peer) {
      if (!left(peer)) return false;
    }
    return true;
  };
  const auto pending = [&](int32_t peer) {
    return left(peer) ? std::nullopt : std::optional(Pending{epoch_, int64_t{epoch_} - 1});
  };
  while (!all_left()) wait(all_left, pending);
  // What an aborted call has sent may still be on its way, as nobody has waited for it.
  for (int32_t peer = 0; peer < ranks() && aborted_; ++peer) {
    if (present(peer)) memory_.peer(peer).fence();
  }
  aborted_ = false;
  ++epoch_;
  any_call_ = true;
  within_call_ = true;
  std::fill(header_received_.begin(), header_received_.end(), uint8_t{0});
  header_received_[index(rank())] = 1;
  pending_headers_ = ranks() - 1;
}

void Exchange::leave() {
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (peer != rank() && present(peer)) push(Kind::kAck, peer, kLeft);
  }
  within_call_ = false;
}

void Exchange::refuse(const std::string& reason) {
  aborted_ = true;
  // Store the reason for all phases, because peers may be in another phase than this rank.
  for (const Phase phase : kPhases) memory_.set_reason(phase, epoch_, reason);
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (peer == rank() || !present(peer)) continue;
    push(Kind::kHeader, peer, kRefusedValue);
    push(Kind::kPublished, peer, kRefusedValue);
  }
  leave();
}

void Exchange::throw_refusal(int32_t peer) {
  aborted_ = true;
  const RefusalReport report = memory_.refusal(peer, phase_, epoch_);
  leave();
  throw PeerRefused(report);
}

bool Exchange::refused(int32_t peer) const {
  const Signal signal = peek(Kind::kPublished, peer);
  return signal.epoch == epoch_ && signal.value == kRefusedValue;
}

void Exchange::check_refusal(int32_t peer) {
  if (refused(peer)) throw_refusal(peer);
}

void Exchange::disagree(const std::string& name, int64_t ours, int64_t theirs, int32_t peer) {
  const BadArgument error = disagreement(name, ours, rank(), theirs, peer);
  refuse(error.what());
  throw BadArgument(error);
}

// --- Call headers ---------------------------------------------------------------------------

void Exchange::send_headers(const Headers& headers) {
  signature_ = headers.signature;
  const int32_t locals = signature_.experts / ranks();
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (!present(peer)) continue;
    const Peer& to = memory_.peer(peer);
    const CallHeader header{signature_, headers.records[index(peer)], headers.rows[index(peer)]};
    to.put(offset_ + layout_.header_offset(rank()), &header, sizeof header);
    if (headers.counts != nullptr) {
      to.put(offset_ + layout_.counts_offset(rank(), locals), headers.counts + peer * locals,
             locals * int64_t{sizeof(int32_t)});
    }
    push(Kind::kHeader, peer, 0);
  }
}

const CallHeader& Exchange::header(int32_t peer) const {
  return *reinterpret_cast<const CallHeader*>(memory_.own() + offset_ +
                                              layout_.header_offset(peer));
}

const int32_t* Exchange::counts(int32_t peer) const {
  return reinterpret_cast<const int32_t*>(
      memory_.own() + offset_ + layout_.counts_offset(peer, signature_.experts / ranks()));
}

void Exchange::check_signature(int32_t peer, const CallSignature& theirs) {
  const auto same = [&](const char* name, int64_t ours, int64_t other) {
    if (ours != other) disagree(name, ours, other, peer);
  };
  same("call (1 dispatch, 2 cached dispatch, 3 combine)", static_cast<int64_t>(signature_.call),
       static_cast<int64_t>(theirs.call));
  same("num_experts", signature_.experts, theirs.experts);
  same("top_k", signature_.top_k, theirs.top_k);
  same("bytes of a row", signature_.row_bytes, theirs.row_bytes);
  same("scales of a row", signature_.scale_words, theirs.scale_words);
  same("weights given (0 no, 1 yes)", signature_.weighted, theirs.weighted);
}

void Exchange::receive_headers(const std::vector<int64_t>* expected_rows) {
  for (int32_t peer = 0; peer < ranks() && !agreed(); ++peer) {
    if (header_received(peer)) continue;
    if (present(peer)) {
      const Signal signal = peek(Kind::kHeader, peer);
      if (signal.epoch != epoch_) continue;
      if (signal.value == kRefusedValue) throw_refusal(peer);
      check_signature(peer, header(peer).signature);
      const int64_t rows = header(peer).rows;
      if (expected_rows != nullptr && (*expected_rows)[index(peer)] != rows) {
        disagree("rows of the plan", (*expected_rows)[index(peer)], rows, peer);
      }
    }
    header_received_[index(peer)] = 1;
    --pending_headers_;
  }
}

bool Exchange::has_unread_signal() const {
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (header_received(peer)) {
      if (peer != rank() && present(peer) && refused(peer)) return true;
      continue;
    }
    if (!present(peer) || peek(Kind::kHeader, peer).epoch == epoch_) return true;
  }
  return false;
}

std::optional<Pending> Exchange::pending_header(int32_t peer) const {
  if (header_received(peer) || !present(peer)) return std::nullopt;
  return Pending{epoch_, peek(Kind::kHeader, peer).epoch};
}

void Exchange::await_headers() {
  receive_headers(nullptr);
  while (!agreed()) {
    wait([&] { return has_unread_signal(); }, [&](int32_t peer) { return pending_header(peer); });
    receive_headers(nullptr);
  }
}

// --- Streams --------------------------------------------------------------------------------

int32_t Exchange::chunks(const StreamPlace& word) const {
  const Signal signal = memory_.peek(word.rank, word.offset);
  return signal.epoch == epoch_ && signal.value != kRefusedValue ? signal.value : -1;
}

// --- Waiting --------------------------------------------------------------------------------

Signal Exchange::heartbeat_of(int32_t rank) const {
  if (!is_here(rank)) return peek(Kind::kHeartbeat, rank);
  return memory_.peek(rank, offset_ + signals_.watch_offset());
}

void Exchange::push_heartbeat(int32_t value) {
  heartbeat_ = Signal{heartbeat_.epoch + 1, value};
  memory_.peer(rank()).signal_quietly(offset_ + signals_.watch_offset(), heartbeat_);
}

void Exchange::send_heartbeat() const {
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (is_here(peer) || !present(peer)) continue;
    memory_.peer(peer).signal_quietly(signal(Kind::kHeartbeat, rank()), heartbeat_);
  }
}

// Peers then blame `late_peer`, not this rank, which is in no call any more.
void Exchange::tell_of_giving_up(int32_t late_peer) noexcept {
  if (late_peer < 0) return;  // no single peer's fault
  try {
    push_heartbeat(gave_up_for(late_peer));
    send_heartbeat();
  } catch (...) {  // NOLINT(bugprone-empty-catch): the caller throws what has happened
  }
}

void Exchange::wait(const std::function<bool()>& ready,
                    const std::function<std::optional<Pending>(int32_t)>& pending) {
  if (ready()) return;
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    heartbeats_[index(peer)] = Heartbeat{heartbeat_of(peer).epoch, 0};
  }
  // Ranks on other hosts get the heartbeats of long waits only, and few: each wakes them.
  const auto start = std::chrono::steady_clock::now();
  int64_t sent = 0;
  const auto report = [&] {
    const int32_t late_peer = find_late_peer(pending);
    push_heartbeat(waits_for(late_peer));
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited / kHeartbeatInterval > sent) {
      sent = waited / kHeartbeatInterval;
      send_heartbeat();
    }
    const Pending missing = pending(late_peer).value_or(Pending{epoch_, int64_t{epoch_} - 1});
    return TimeoutReport{rank(), late_peer, name_of(phase_), missing.expected, missing.actual,
                         0.0,    false};
  };
  try {
    memory_.wait_until(phase_, ready, report);
  } catch (const PeerTimeout& error) {
    tell_of_giving_up(error.report.peer);
    throw;
  } catch (const TransportError& error) {
    tell_of_giving_up(error.report.peer);
    throw;
  }
  push_heartbeat(kWaitsForNobody);
  if (sent > 0) send_heartbeat();
}

// Begins with the pending peer without a heartbeat for the longest time. While that peer waits for
// another one, or has given up for its sake, goes on to the other one, until a peer is stuck, has
// ended, or is in no call.
int32_t Exchange::find_late_peer(const std::function<std::optional<Pending>(int32_t)>& pending) {
  int32_t suspect = kNobody;
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    Heartbeat& heartbeat = heartbeats_[index(peer)];
    const uint32_t count = heartbeat_of(peer).epoch;
    heartbeat =
        count == heartbeat.count ? Heartbeat{count, heartbeat.unchanged + 1} : Heartbeat{count, 0};
    if (peer == rank() || !present(peer) || !pending(peer)) continue;
    if (suspect == kNobody || heartbeat.unchanged > heartbeats_[index(suspect)].unchanged) {
      suspect = peer;
    }
  }
  for (int32_t hop = 0; hop < ranks() && suspect != kNobody; ++hop) {
    const int32_t value = heartbeat_of(suspect).value;
    const int32_t next = std::abs(value) - 1;
    const bool current = value < 0 || heartbeats_[index(suspect)].unchanged < kMissedHeartbeats;
    if (!current || next < 0 || next >= ranks() || next == rank() || !present(next)) break;
    suspect = next;
  }
  return suspect == kNobody ? rank() : suspect;
}

}  // namespace fanfold
