// Keeps all ranks in step over the calls of the high-throughput mode, and reports which rank is
// late.
//
// Every rank takes part in every call:
//   1. A rank begins a call once every peer has left the previous one.
//   2. Each rank sends a call header to every peer.
//   3. Rows stream between the ranks (host/stream.h).
//   4. Each rank leaves the call when it has read all of its rows.
//
// A rank whose input is bad refuses the call instead, at any time before the last publish of its
// streams. A refusal aborts the call on every rank, and all ranks stay in step: no rank completes a
// call before it has received and checked the headers of all ranks (see `agreed`).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "layout/high_throughput.h"
#include "memory/symmetric.h"

namespace fanfold {

// How far a peer has come with a header, rows or acknowledgements that this rank waits for. A
// PeerTimeout reports both numbers.
struct Pending {
  int64_t expected;
  int64_t actual;
};

// A place of a stream, of its ring or of one of its words: in whose memory it lies, and where. Only
// memory of this host can be read.
struct StreamPlace {
  int32_t rank;
  int64_t offset;
};

class Exchange {
 public:
  // Uses `bytes` at `offset` of the modes' part of `memory`, which must outlive the exchange. The
  // first call has the number `epoch` + 1; `epoch` must be the same on all ranks.
  Exchange(SymmetricMemory& memory, int64_t offset, int64_t bytes, uint32_t epoch = 0);

  int32_t rank() const { return memory_.rank(); }
  int32_t ranks() const { return memory_.ranks(); }
  const Hosts& hosts() const { return memory_.hosts(); }
  bool is_here(int32_t peer) const { return hosts().together(peer, rank()); }
  bool present(int32_t peer) const { return !memory_.masked(peer); }
  bool within_call() const { return within_call_; }

  // Begins the next call, once every peer has left the previous one. Throws PeerTimeout, and Misuse
  // if an earlier call was interrupted.
  void begin(Phase phase);
  // Changes the phase that errors of this call name.
  void enter(Phase phase) { phase_ = phase; }
  // Ends the call on this rank, which must have read all of its rows.
  void leave();
  // Ends the call on this rank and aborts it with `reason` on every other.
  void refuse(const std::string& reason);

  // The call headers of this rank. Each peer gets the signature, its element of `records` (in the
  // stream that the peer reads) and its element of `rows` (those of them that are for the peer). If
  // `counts` ([experts]) is given, each peer also gets the row counts of its experts.
  struct Headers {
    CallSignature signature;
    std::vector<int64_t> records;
    std::vector<int64_t> rows;
    const int32_t* counts;
  };
  void send_headers(const Headers& headers);

  // Reads the call headers that have arrived. Throws PeerRefused if a peer has refused. Refuses the
  // call and throws BadArgument if a signature differs, or if `expected_rows` is given and a header
  // has another number of rows.
  void receive_headers(const std::vector<int64_t>* expected_rows);
  // Whether the header of `peer` has arrived, or the peer is masked.
  bool header_received(int32_t peer) const { return header_received_[index(peer)] != 0; }
  // Whether all headers have arrived and their signatures are equal.
  bool agreed() const { return pending_headers_ == 0; }
  // Whether a header or a refusal has arrived that this rank has not handled yet.
  bool has_unread_signal() const;
  void await_headers();

  const CallHeader& header(int32_t peer) const;
  const int32_t* counts(int32_t peer) const;  // [local experts], rows from `peer`

  // The place of a signal in the memory of any rank.
  int64_t signal(HighThroughputSignals::Kind kind, int32_t slot) const {
    return offset_ + signals_.offset(kind, slot);
  }
  // Stores a number of chunks, of this call.
  void set_chunks(const StreamPlace& word, int32_t chunks) const {
    memory_.peer(word.rank).signal(word.offset, Signal{epoch_, chunks});
  }
  // The chunks that have been stored in this call; -1 if there are none, or a refusal.
  int32_t chunks(const StreamPlace& word) const;
  const Peer& peer(int32_t rank) const { return memory_.peer(rank); }
  RowCounts& counted_rows() const { return memory_.rows(); }
  // Whether `peer` has refused the call after sending its header.
  bool refused(int32_t peer) const;
  // Throws PeerRefused if it has.
  void check_refusal(int32_t peer);

  // Waits until `ready()` returns true. `pending(peer)` returns how far a peer has come that this
  // rank waits for, else nothing. If the wait times out, PeerTimeout names the pending peer without
  // a heartbeat for the longest time or, if that peer itself waits, the peer that it waits for.
  void wait(const std::function<bool()>& ready,
            const std::function<std::optional<Pending>(int32_t)>& pending);
  // For `wait`: the header of `peer`, if it has not arrived.
  std::optional<Pending> pending_header(int32_t peer) const;

  // Refuses the call because the value of `peer` differs, and throws BadArgument.
  [[noreturn]] void disagree(const std::string& name, int64_t ours, int64_t theirs, int32_t peer);

  // Where the staging begins in the memory of any rank.
  int64_t staging_offset() const { return offset_ + layout_.staging_offset(); }
  // The address of a place in the memory of a rank on this host.
  const std::byte* at(const StreamPlace& place) const {
    return memory_.base(place.rank) + place.offset;
  }
  int64_t staging_bytes() const { return staging_bytes_; }

 private:
  using Kind = HighThroughputSignals::Kind;
  struct Heartbeat {
    uint32_t count;
    int32_t unchanged;  // polls in a row that found the same count
  };

  static size_t index(int32_t peer) { return static_cast<size_t>(peer); }
  Signal peek(Kind kind, int32_t peer) const { return memory_.peek(signal(kind, peer)); }
  void push(Kind kind, int32_t peer, int32_t value) const;
  Signal heartbeat_of(int32_t rank) const;
  void push_heartbeat(int32_t value);
  void send_heartbeat() const;
  void tell_of_giving_up(int32_t late_peer) noexcept;
  int32_t find_late_peer(const std::function<std::optional<Pending>(int32_t)>& pending);
  void check_signature(int32_t peer, const CallSignature& theirs);
  void throw_refusal(int32_t peer);

  SymmetricMemory& memory_;
  int64_t offset_;
  HighThroughputSignals signals_;
  HighThroughputLayout layout_;
  int64_t staging_bytes_;
  Phase phase_ = Phase::kHighThroughputDispatch;
  uint32_t epoch_;
  bool any_call_ = false;  // whether there has been a call
  bool within_call_ = false;
  bool aborted_ = false;  // the last call, on this rank
  CallSignature signature_{};
  std::vector<uint8_t> header_received_;
  int32_t pending_headers_ = 0;
  std::vector<Heartbeat> heartbeats_;
  Signal heartbeat_{};  // the last one
};

}  // namespace fanfold
