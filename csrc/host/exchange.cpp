#include "host/exchange.h"

#include <algorithm>
#include <cstring>

#include "base/atomics.h"

namespace fanfold {
namespace {

// A waiting rank shows life about every 50 ms; one that has not for this many looks is stuck.
constexpr int32_t kLooks = 3;
constexpr int32_t kNobody = -1;

constexpr Phase kPhases[] = {Phase::kHighThroughputCounts, Phase::kHighThroughputDispatch,
                             Phase::kHighThroughputCombine};

}  // namespace

Exchange::Exchange(SymmetricMemory& memory, int64_t offset, int64_t bytes, uint32_t epoch)
    : memory_(memory), offset_(offset), signals_{memory.ranks()}, layout_{memory.ranks()},
      staging_bytes_(bytes - layout_.staging_offset()), epoch_(epoch),
      heard_(index(memory.ranks())), pulses_(index(memory.ranks())) {
  if (offset < 0 || offset + bytes > memory.bytes() || staging_bytes_ <= 0) {
    throw BadArgument(
        "bytes", std::to_string(bytes),
        "above " + std::to_string(layout_.staging_offset()) + " and within the symmetric memory");
  }
}

void Exchange::push(Kind kind, int32_t peer, int32_t value) const {
  memory_.push(peer, signal(kind, memory_.rank()), Signal{epoch_, value});
}

// --- The course of a call -------------------------------------------------------------------

void Exchange::begin(Phase phase) {
  memory_.check_usable();
  if (within_call_) {
    throw Misuse("an earlier high-throughput call was interrupted before its end; close it");
  }
  phase_ = phase;
  // A peer that is one call ahead has left this one too.
  const auto left = [&](int32_t peer) {
    const Signal signal = peek(Kind::kTaken, peer);
    return !present(peer) || peer == rank() || !called_ ||
           (signal.epoch == epoch_ && signal.value == kLeft) || signal.epoch == epoch_ + 1;
  };
  const auto all_left = [&] {
    for (int32_t peer = 0; peer < ranks(); ++peer) {
      if (!left(peer)) return false;
    }
    return true;
  };
  const auto debt = [&](int32_t peer) {
    return left(peer) ? std::nullopt : std::optional(Debt{epoch_, int64_t{epoch_} - 1});
  };
  while (!all_left()) wait(all_left, debt);
  ++epoch_;
  called_ = true;
  within_call_ = true;
  std::fill(heard_.begin(), heard_.end(), uint8_t{0});
  heard_[index(rank())] = 1;
  unheard_ = ranks() - 1;
}

void Exchange::leave() {
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (peer != rank() && present(peer)) push(Kind::kTaken, peer, kLeft);
  }
  within_call_ = false;
}

void Exchange::refuse(const std::string& reason) {
  // Peers may be in another phase of the call than this rank.
  for (const Phase phase : kPhases) memory_.set_reason(phase, epoch_, reason);
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (peer == rank() || !present(peer)) continue;
    push(Kind::kAnnounced, peer, kRefusedValue);
    push(Kind::kPublished, peer, kRefusedValue);
  }
  leave();
}

void Exchange::pass_on_refusal(int32_t peer) {
  const RefusalFacts facts = memory_.refusal(peer, phase_, epoch_);
  leave();
  throw PeerRefused(facts);
}

bool Exchange::refused(int32_t peer) const {
  const Signal signal = peek(Kind::kPublished, peer);
  return signal.epoch == epoch_ && signal.value == kRefusedValue;
}

void Exchange::check_refusal(int32_t peer) {
  if (refused(peer)) pass_on_refusal(peer);
}

void Exchange::disagree(const std::string& name, int64_t ours, int64_t theirs, int32_t peer) {
  const BadArgument error = disagreement(name, ours, rank(), theirs, peer);
  refuse(error.what());
  throw BadArgument(error);
}

// --- Announcements --------------------------------------------------------------------------

void Exchange::announce(const Offer& offer) {
  facts_ = offer.facts;
  const int32_t locals = facts_.experts / ranks();
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (!present(peer)) continue;
    std::byte* base = memory_.base(peer) + offset_;
    const Announcement announcement{facts_, offer.records[index(peer)], offer.rows[index(peer)]};
    std::memcpy(base + layout_.announcement_offset(rank()), &announcement, sizeof announcement);
    if (offer.counts != nullptr) {
      std::memcpy(base + layout_.counts_offset(rank(), locals), offer.counts + peer * locals,
                  static_cast<size_t>(locals) * sizeof(int32_t));
    }
    push(Kind::kAnnounced, peer, 0);
  }
}

const Announcement& Exchange::announcement(int32_t peer) const {
  return *reinterpret_cast<const Announcement*>(memory_.base(rank()) + offset_ +
                                                layout_.announcement_offset(peer));
}

const int32_t* Exchange::counts(int32_t peer) const {
  return reinterpret_cast<const int32_t*>(memory_.base(rank()) + offset_ +
                                          layout_.counts_offset(peer, facts_.experts / ranks()));
}

void Exchange::check_facts(int32_t peer, const CallFacts& theirs) {
  const auto same = [&](const char* name, int64_t ours, int64_t other) {
    if (ours != other) disagree(name, ours, other, peer);
  };
  same("call (1 dispatch, 2 cached dispatch, 3 combine)", static_cast<int64_t>(facts_.call),
       static_cast<int64_t>(theirs.call));
  same("num_experts", facts_.experts, theirs.experts);
  same("top_k", facts_.top_k, theirs.top_k);
  same("bytes of a row", facts_.row_bytes, theirs.row_bytes);
  same("scales of a row", facts_.scale_words, theirs.scale_words);
  same("weights given (0 no, 1 yes)", facts_.weighted, theirs.weighted);
}

void Exchange::hear(const std::vector<int64_t>* expected_rows) {
  for (int32_t peer = 0; peer < ranks() && !agreed(); ++peer) {
    if (heard(peer)) continue;
    if (present(peer)) {
      const Signal signal = peek(Kind::kAnnounced, peer);
      if (signal.epoch != epoch_) continue;
      if (signal.value == kRefusedValue) pass_on_refusal(peer);
      check_facts(peer, announcement(peer).facts);
      const int64_t rows = announcement(peer).rows;
      if (expected_rows != nullptr && (*expected_rows)[index(peer)] != rows) {
        disagree("rows of the plan", (*expected_rows)[index(peer)], rows, peer);
      }
    }
    heard_[index(peer)] = 1;
    --unheard_;
  }
}

bool Exchange::news() const {
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (heard(peer)) {
      if (peer != rank() && present(peer) && refused(peer)) return true;
      continue;
    }
    if (!present(peer) || peek(Kind::kAnnounced, peer).epoch == epoch_) return true;
  }
  return false;
}

std::optional<Debt> Exchange::announcement_debt(int32_t peer) const {
  if (heard(peer) || !present(peer)) return std::nullopt;
  return Debt{epoch_, peek(Kind::kAnnounced, peer).epoch};
}

void Exchange::await_announcements() {
  hear(nullptr);
  while (!agreed()) {
    wait([&] { return news(); }, [&](int32_t peer) { return announcement_debt(peer); });
    hear(nullptr);
  }
}

// --- Streams --------------------------------------------------------------------------------

void Exchange::publish(int32_t peer, int32_t chunks) const { push(Kind::kPublished, peer, chunks); }

void Exchange::take(int32_t peer, int32_t chunks) const { push(Kind::kTaken, peer, chunks); }

int32_t Exchange::published(int32_t peer) const {
  const Signal signal = peek(Kind::kPublished, peer);
  return signal.epoch == epoch_ && signal.value != kRefusedValue ? signal.value : -1;
}

int32_t Exchange::taken(int32_t peer) const {
  const Signal signal = peek(Kind::kTaken, peer);
  return signal.epoch == epoch_ ? signal.value : 0;
}

// --- Waiting --------------------------------------------------------------------------------

Signal Exchange::watch_of(int32_t rank) const {
  const std::byte* word = memory_.base(rank) + offset_ + signals_.watch_offset();
  return Signal::decode(load_acquire_system(reinterpret_cast<const uint64_t*>(word)));
}

void Exchange::set_watch(int32_t blamed) {
  memory_.push_quietly(rank(), offset_ + signals_.watch_offset(), Signal{++beats_, blamed + 1});
}

void Exchange::wait(const std::function<bool()>& ready,
                    const std::function<std::optional<Debt>(int32_t)>& debt) {
  if (ready()) return;
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    pulses_[index(peer)] = Pulse{watch_of(peer).epoch, 0};
  }
  memory_.wait_until(ready, [&] {
    const int32_t blamed = culprit(debt);
    set_watch(blamed);
    const Debt owed = debt(blamed).value_or(Debt{epoch_, int64_t{epoch_} - 1});
    return TimeoutFacts{rank(), blamed, name_of(phase_), owed.expected, owed.actual, 0.0, false};
  });
  set_watch(kNobody);
}

// A peer that itself waits for another is not to blame: the chain is followed from the debtor that
// has shown no life for longest to one that is stuck, or has ended, or is in no call at all.
int32_t Exchange::culprit(const std::function<std::optional<Debt>(int32_t)>& debt) {
  int32_t suspect = kNobody;
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    Pulse& pulse = pulses_[index(peer)];
    const uint32_t count = watch_of(peer).epoch;
    pulse = count == pulse.count ? Pulse{count, pulse.unchanged + 1} : Pulse{count, 0};
    if (peer == rank() || !present(peer) || !debt(peer)) continue;
    if (suspect == kNobody || pulse.unchanged > pulses_[index(suspect)].unchanged) suspect = peer;
  }
  for (int32_t hop = 0; hop < ranks() && suspect != kNobody; ++hop) {
    const int32_t next = watch_of(suspect).value - 1;
    const bool alive = pulses_[index(suspect)].unchanged < kLooks;
    if (!alive || next < 0 || next >= ranks() || next == rank() || !present(next)) break;
    suspect = next;
  }
  return suspect == kNobody ? rank() : suspect;
}

}  // namespace fanfold
