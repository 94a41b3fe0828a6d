// A proxy thread's state for one peer: the channel to it and the channel from it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "layout/command.h"
#include "proxy/failure.h"
#include "proxy/queue.h"
#include "proxy/span.h"
#include "proxy/stats.h"
#include "proxy/window.h"
#include "transport/transport.h"

namespace fanfold::proxy {

// How a store travels: as a message of these bytes, which the peer executes when its turn has come.
struct alignas(16) StoredWord {
  int64_t offset;
  uint64_t word;
};

// What is left of a command, or of several that were coalesced.
struct Pending {
  CommandKind kind = CommandKind::kWrite;
  Span span{};          // of a write
  int64_t each = 0;     // of a write: parts of a message; 0 until the first message is made
  int32_t counter = 0;  // of a signal
  uint32_t amount = 0;  // of a signal
  StoredWord stored{};  // of a store
  std::chrono::nanoseconds taken{};  // when, by the thread's clock of steps
};

// Commands that a channel takes from the ring before it has sent the earlier ones.
inline constexpr size_t kPendingCommands = 64;

struct Channel {
  Channel(int32_t peer_, const Credit& theirs, const Credit& ours, int32_t acknowledgement_bits,
          uint64_t first_sequence)
      : peer(peer_), out(theirs, acknowledgement_bits, first_sequence), in(ours, first_sequence),
        pending(kPendingCommands), sent_at(kMostInFlight) {}

  bool busy() const { return !given_up && (!pending.empty() || !out.idle()); }

  // Whether something that has arrived is not acknowledged, or the acknowledgement is on its way.
  bool owes() const {
    return !given_up && failure == nullptr && (in.news() > 0 || in.acknowledgement_in_flight());
  }

  // When the transport got the message of a number that is in flight.
  std::chrono::nanoseconds& when_sent(uint64_t sequence) {
    return sent_at[static_cast<size_t>(sequence % kMostInFlight)];
  }

  // A completion carries the low half of the sequence number.
  uint64_t whole(uint32_t low) const {
    return out.next() - (static_cast<uint32_t>(out.next()) - low);
  }

  int32_t peer;
  std::string path;  // how the transport reaches the peer, for messages; may be empty
  transport::RemoteMemory target;
  transport::RemoteMemory inbox;  // the peer's stored words
  transport::RemoteMemory rows;   // the peer's RowsMemory, if there is one
  SendWindow out;
  ReceiveWindow in;
  Queue<Pending> pending;
  Counted counted;
  std::vector<std::chrono::nanoseconds> sent_at;
  std::chrono::nanoseconds moved{};  // when the channel was idle last, or something was freed
  bool stalled = false;              // the first pending command waits for credit
  bool in_sending = false;           // is in the thread's list of channels with pending commands
  bool in_news = false;              // is in the thread's list of channels to acknowledge
  bool arrived = false;              // something new has arrived in this step
  bool given_up = false;             // nothing is sent to the peer any more
  // Set if the peer was lost while nothing was outstanding, or given up. Written once.
  std::unique_ptr<const Failure> failure;
  std::atomic<const Failure*> lost = nullptr;  // `failure`, for other threads
};

}  // namespace fanfold::proxy
