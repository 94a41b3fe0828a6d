// The state of one channel, an ordered pair of ranks, at its sender and at its receiver.
//
// Both are plain state machines: they know no network, no thread and no clock. Sequence numbers are
// counted in 64 bits here; the wire carries their low bits. Both sides of a channel begin with the
// same number.
//
// The receiver can tell a new message from one that arrives again because two things hold:
//
//   - The sender has at most 128 messages between its oldest message in flight and its next one. A
//     message is in flight until the peer has acknowledged it and the transport has completed it.
//   - The receiver gets a copy of a message before it gets any message that the sender began after
//     the transport had completed the first one.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

#include "layout/immediate.h"

namespace fanfold::proxy {

// What a receiver allows a sender to have in flight on one channel.
struct Credit {
  int32_t messages;  // 1 to kMostInFlight
  int64_t bytes;     // at least 1

  auto operator<=>(const Credit&) const = default;
};

// Throws BadArgument if `credit` is out of bounds.
void check_credit(const Credit& credit);

// The sender's side of a channel.
class SendWindow {
 public:
  // `acknowledgement_bits` is the width of an acknowledgement on the wire, 9 to 32.
  SendWindow(const Credit& credit, int32_t acknowledgement_bits, uint64_t first_sequence = 0);

  // Whether one more message of `bytes` bytes is within the credit.
  bool admits(int64_t bytes) const;
  // Whether a message in flight writes to any of the `bytes` bytes at `target`. A copy of it could
  // land after a new message there.
  bool writes_to(int64_t target, int64_t bytes) const;
  // The number of the next message.
  uint64_t next() const { return next_; }
  // Counts the next message, `bytes` bytes to `target`, as in flight. Throws Misuse if it is
  // outside of the credit.
  void post(int64_t bytes, int64_t target);

  // Takes an acknowledgement as decoded from the wire. Returns whether it acknowledges messages
  // that no earlier one did. A repeated or overtaken acknowledgement changes nothing.
  bool acknowledge(uint32_t accepted);
  // The transport has completed the message `sequence`. Returns false if that message is not in
  // flight, or has been completed before.
  bool complete(uint64_t sequence);

  // Messages and bytes in flight.
  int32_t messages() const { return static_cast<int32_t>(next_ - oldest_); }
  int64_t bytes() const { return bytes_; }
  bool idle() const { return next_ == oldest_; }
  // Messages that the peer has not acknowledged.
  int32_t unacknowledged() const { return static_cast<int32_t>(next_ - acknowledged_); }
  const Credit& credit() const { return credit_; }

  auto operator<=>(const SendWindow&) const = default;

 private:
  struct Sent {
    int64_t bytes = 0;
    int64_t target = 0;
    bool completed = false;

    auto operator<=>(const Sent&) const = default;
  };
  Sent& sent(uint64_t sequence) { return sent_[place(sequence)]; }
  size_t place(uint64_t sequence) const {
    return static_cast<size_t>(sequence) & (sent_.size() - 1);
  }
  void free_oldest();

  Credit credit_;
  uint32_t acknowledgement_mask_;
  uint64_t oldest_;        // in flight, or `next_`
  uint64_t acknowledged_;  // the peer has accepted every message below this one
  uint64_t next_;
  int64_t bytes_ = 0;
  std::vector<Sent> sent_;  // of the messages from `oldest_` to `next_`
};

// What a message adds to a counter.
struct Addition {
  int32_t counter = 0;
  uint32_t amount = 0;

  auto operator<=>(const Addition&) const = default;
};

// A signal or a store whose turn has come.
struct Due {
  bool store = false;
  uint64_t sequence = 0;  // of its message
  Addition addition;      // of a signal

  auto operator<=>(const Due&) const = default;
};

enum class Acceptance {
  kNew,
  kDuplicate,  // a copy of a message that was accepted before
  kInvalid,    // the sender has more in flight than it was granted
};

// The receiver's side of a channel.
class ReceiveWindow {
 public:
  explicit ReceiveWindow(const Credit& credit, uint64_t first_sequence = 0);

  // Takes an arrival of data, a signal or a store. The caller counts new data at once, and executes
  // a signal or a store when `next_due` returns it.
  Acceptance accept(const Immediate& message);
  // The next signal or store all of whose earlier messages have arrived. Call it after each new
  // message until it returns nothing: only then are the messages accepted in order.
  std::optional<Due> next_due();

  // Messages accepted in order that no acknowledgement has reported yet.
  int32_t news() const { return static_cast<int32_t>(in_order_ - reported_); }
  // Whether to send an acknowledgement now. `quiet`: nothing new arrives on this channel.
  bool should_acknowledge(bool quiet) const;
  // The number that an acknowledgement carries, before it is cut to its width.
  uint64_t accepted_in_order() const { return in_order_; }
  // An acknowledgement is on its way; there is at most one until the transport has completed it.
  void acknowledgement_sent();
  // Returns false if no acknowledgement is on its way.
  bool acknowledgement_completed();
  bool acknowledgement_in_flight() const { return acknowledgement_in_flight_; }

  auto operator<=>(const ReceiveWindow&) const = default;

 private:
  enum class Slot : uint8_t { kMissing, kData, kSignal, kStore };
  struct Arrived {
    Slot slot = Slot::kMissing;
    Addition addition;

    auto operator<=>(const Arrived&) const = default;
  };
  Arrived& arrived(uint64_t sequence);

  int32_t window_;
  uint64_t in_order_;  // every message below this one has arrived, and its signals are counted
  uint64_t reported_;  // the last acknowledgement carried this number
  bool acknowledgement_in_flight_ = false;
  std::vector<Arrived> arrived_;  // of the messages from `in_order_` on
};

}  // namespace fanfold::proxy
