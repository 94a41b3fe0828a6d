// The calls of the high-throughput mode as all ranks see them: numbered, announced, watched.
//
// Every rank takes part in every call. A call begins once every peer has left the previous one;
// each rank announces what it brings; rows stream (host/stream.h); each rank leaves when it has
// read all that is for it. A rank that finds its own input bad refuses instead, at any time before
// the last publish of its streams, which makes the call void everywhere and keeps all ranks in
// step: no rank completes a call before every rank has seen every announcement and agreed (see
// `agreed`).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "layout/high_throughput.h"
#include "memory/symmetric.h"

namespace fanfold {

// What a peer still owes this rank: words for PeerTimeout.
struct Debt {
  int64_t expected;
  int64_t actual;
};

class Exchange {
 public:
  // Uses `bytes` at `offset` of the modes' part of `memory`, which must outlive it. Calls are
  // numbered from `epoch` + 1, on all ranks alike.
  Exchange(SymmetricMemory& memory, int64_t offset, int64_t bytes, uint32_t epoch = 0);

  int32_t rank() const { return memory_.rank(); }
  int32_t ranks() const { return memory_.ranks(); }
  bool present(int32_t peer) const { return !memory_.masked(peer); }
  bool within_call() const { return within_call_; }

  // Throws Misuse if an earlier call was interrupted, and PeerTimeout.
  void begin(Phase phase);
  // The same call goes on under another name.
  void enter(Phase phase) { phase_ = phase; }
  // This rank reads nothing more of this call.
  void leave();
  // Ends the call with `reason` on this rank, void on every other.
  void refuse(const std::string& reason);

  // Says what this rank brings and, per peer, `records` of its stream and `rows` for the peer;
  // with `counts` ([experts]) each peer also gets the rows of its experts.
  struct Offer {
    CallFacts facts;
    std::vector<int64_t> records;
    std::vector<int64_t> rows;
    const int32_t* counts;
  };
  void announce(const Offer& offer);

  // Reads the announcements that have arrived since; throws PeerRefused for a refusal, and
  // BadArgument (after refusing) for a peer that disagrees. With `expected_rows`, a peer must offer
  // that many.
  void hear(const std::vector<int64_t>* expected_rows);
  bool heard(int32_t peer) const { return heard_[index(peer)] != 0; }
  bool agreed() const { return unheard_ == 0; }
  // Whether an announcement or a refusal waits to be heard.
  bool news() const;
  void await_announcements();

  const Announcement& announcement(int32_t peer) const;
  const int32_t* counts(int32_t peer) const;  // [local experts], rows from `peer`

  void publish(int32_t peer, int32_t chunks) const;
  void take(int32_t peer, int32_t chunks) const;
  // Chunks that `peer` has published in this call; -1 before its first word, or if it refused.
  int32_t published(int32_t peer) const;
  int32_t taken(int32_t peer) const;
  // Whether `peer` has refused the call after announcing; the second throws PeerRefused if so.
  bool refused(int32_t peer) const;
  void check_refusal(int32_t peer);

  // Waits until `ready()`. `debt` says what each peer owes; if time runs out, the one blamed is the
  // one that has shown no life for longest, or whom that one itself waits for.
  void wait(const std::function<bool()>& ready,
            const std::function<std::optional<Debt>(int32_t)>& debt);
  // What `peer` owes before it has announced.
  std::optional<Debt> announcement_debt(int32_t peer) const;

  // Refuses because `peer` brings another value than this rank, and throws BadArgument.
  [[noreturn]] void disagree(const std::string& name, int64_t ours, int64_t theirs, int32_t peer);

  std::byte* staging(int32_t owner) const {
    return memory_.base(owner) + offset_ + layout_.staging_offset();
  }
  int64_t staging_bytes() const { return staging_bytes_; }

 private:
  using Kind = HighThroughputSignals::Kind;
  struct Pulse {
    uint32_t count;
    int32_t unchanged;  // looks in a row that found the same count
  };

  static size_t index(int32_t peer) { return static_cast<size_t>(peer); }
  int64_t signal(Kind kind, int32_t peer) const { return offset_ + signals_.offset(kind, peer); }
  Signal peek(Kind kind, int32_t peer) const { return memory_.peek(signal(kind, peer)); }
  void push(Kind kind, int32_t peer, int32_t value) const;
  Signal watch_of(int32_t rank) const;
  void set_watch(int32_t blamed);
  int32_t culprit(const std::function<std::optional<Debt>(int32_t)>& debt);
  void check_facts(int32_t peer, const CallFacts& theirs);
  void pass_on_refusal(int32_t peer);

  SymmetricMemory& memory_;
  int64_t offset_;
  HighThroughputSignals signals_;
  HighThroughputLayout layout_;
  int64_t staging_bytes_;
  Phase phase_ = Phase::kHighThroughputDispatch;
  uint32_t epoch_;
  bool called_ = false;  // whether there has been a call
  bool within_call_ = false;
  CallFacts facts_{};
  std::vector<uint8_t> heard_;
  int32_t unheard_ = 0;
  std::vector<Pulse> pulses_;
  uint32_t beats_ = 0;
};

}  // namespace fanfold
