// A network inside one process: the test double of every real one.
//
// All ranks of the process share a `Network`; each thread of each rank opens one transport of it.
// A seed decides the fate of every write: when it lands, in which order and pieces, whether it
// lands twice, when it completes. The decisions on a write depend only on the seed, on the ranks
// and threads at both ends, and on how many writes went that way before. If one thread drives all
// ranks, the same seed and the same calls give the same events.
//
// Time is virtual, in nanoseconds. It passes in `Network::advance`, and in each poll by
// `Options::poll_ns`.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/transport.h"

namespace fanfold::transport::loopback {

// A time in nanoseconds, drawn evenly between `least` and `most`. One in `rare_one_in` takes
// `rare` longer; 0 is none, here and in every `one_in`.
struct Delay {
  int64_t least = 0;
  int64_t most = 0;
  int32_t rare_one_in = 0;
  int64_t rare = 0;
};

enum class Completions {
  kAfterLanding,   // as with delivery acknowledged by the target
  kBeforeLanding,  // as with a provider that copies the source, or that only hands it to the wire
  kDrawn,          // one or the other for each write
};

enum class SourceRead {
  kAtWrite,  // a copy, before `write` returns
  kLate,     // at the landing, or just before the completion is reported if that is earlier
  kDrawn,
};

enum class Overflow {
  kStallsSender,  // a write that finds no room in the receive queue waits, and does not complete
  kFailsPeer,     // it is lost, and its sender loses the peer
};

// The links of a rank, one for each rail, with the same bandwidth in both directions. They turn
// many senders of one target (incast) into lost packets:
//
//   - A write is a train of packets of `packet_bytes` plus `header_bytes`. A packet of b bytes
//     occupies a link for b / bandwidth. The source's link sends its trains one after the other.
//   - The target's link drains a queue. A packet that arrives when the queue holds q bytes is
//     dropped if q + b > buffer_bytes. Otherwise it leaves after (q + b) / bandwidth.
//   - After a drop, the rest of the train is useless but still occupies the link. The sender
//     resends it from the dropped packet on, `retransmit_ns` after the drop.
//
// If n senders start trains of w bytes each to one target at the same time, n * w bytes arrive
// within w / bandwidth, and the queue grows to (n - 1) * w. No packet is dropped if
// (n - 1) * w + n * packet <= buffer_bytes. So credits that bound w by buffer_bytes / (n - 1)
// keep the whole bandwidth. Without them each of r rounds of drops costs the useless rest of the
// trains, and the link idles once every sender waits: goodput collapses towards
//   bytes / (bytes / bandwidth + r * retransmit_ns).
struct LinkOptions {
  int64_t bytes_per_us = 0;  // bandwidth, in MB/s; 0 is infinite, without queues
  int64_t buffer_bytes = 0;  // 0 is unlimited
  int64_t packet_bytes = 4096;
  int64_t header_bytes = 64;
  int64_t retransmit_ns = 1'000'000;
};

// The n-th write (from 1) of the transport of (rank, thread) meets an error of the provider.
struct WriteError {
  int32_t rank = 0;
  int32_t thread = 0;
  int64_t number = 1;
  bool at_once = false;  // `write` fails, and the transport with it; else the peer fails later
};

// The default is a network without faults: in order, without delay, and without a bandwidth.
struct Options {
  uint64_t seed = 0;
  int32_t rails = 1;
  int32_t writes = 256;  // in flight on one rail before kAgain
  int64_t write_bytes = int64_t{1} << 30;
  int64_t poll_ns = 0;  // how far one poll advances the time

  Delay delay;               // from the write to its arrival
  bool in_order = true;      // writes of one source, target and rail arrive as they were posted,
                             // except after drops of a link; false: as the delays have it
  int32_t again_one_in = 0;  // refuses a write that has room

  int32_t duplicate_one_in = 0;  // lands again, unless it is complete by then
  Delay duplicate_delay;         // from the first arrival to the second

  int64_t piece_bytes = 0;  // larger writes land in pieces, each at its own time; 0 is never
                            // (no write lands in more than 64 pieces)

  Completions completions = Completions::kAfterLanding;
  Delay completion_delay;  // from the landing; before landing: from the write, or from the entry
                           // into a bounded receive queue
  SourceRead source_read = SourceRead::kLate;

  int32_t stall_one_in = 0;  // a write stalls its target's rail, or all rails of that rank
  Delay stall;

  int32_t receive_queue = 0;  // writes that have arrived and have not landed, on one rail of a
                              // transport; 0 is unlimited
  Overflow overflow = Overflow::kStallsSender;

  bool lands_without_poll = false;  // real providers need the target's poll
  bool arrivals_name_peer = false;

  LinkOptions link;

  int64_t detect_ns = 0;  // from a peer's death, or from an error, to kPeerFailed
  int64_t retry_ns = 0;   // how long a write tries to pass a cut before its sender loses the peer;
                          // 0 is for ever
  std::vector<WriteError> write_errors;

  // Everything that the contract allows at once, without failures.
  static Options hostile(uint64_t seed);
};

// What has happened so far.
struct Counters {
  int64_t writes = 0;
  int64_t again = 0;
  int64_t landed = 0;  // without duplicates
  int64_t bytes_landed = 0;
  int64_t duplicates_landed = 0;
  int64_t pieces_landed = 0;
  int64_t stalls = 0;
  int64_t waited_for_queue = 0;  // writes that found the receive queue full
  int64_t packets = 0;
  int64_t packets_dropped = 0;
  int64_t packets_useless = 0;    // behind a dropped packet of the same write
  int64_t most_queued_bytes = 0;  // in the queue of any link
};

class State;

// Any thread may call it.
class Network {
 public:
  // Throws BadArgument for options out of bounds.
  static std::shared_ptr<Network> create(const Options& options);
  explicit Network(std::unique_ptr<State> state);
  ~Network();

  // The transport of one thread of one rank. It keeps the network alive. Throws BadArgument if the
  // rank or thread is negative, or has an open transport.
  std::unique_ptr<Transport> open(int32_t rank, int32_t thread = 0);

  int64_t now() const;
  void advance(int64_t ns);
  // Time until something happens without a poll; -1 if nothing will.
  int64_t until_next() const;

  // Nothing lands at this rank, or on one rail of it, until the time has passed.
  void stall(int32_t rank, int64_t ns);
  void stall_rail(int32_t rank, int32_t rail, int64_t ns);
  // Nothing passes between the two ranks until the time has passed. A cut never gets shorter.
  void cut(int32_t rank, int32_t peer, int64_t ns);
  static constexpr int64_t kForever = INT64_MAX;
  // The rank's transports fail, what it has sent is lost, and its peers lose it.
  void kill(int32_t rank);

  Counters counters() const;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace fanfold::transport::loopback
