// Why a proxy has stopped.
#pragma once

#include <cstdint>
#include <string>

namespace fanfold::proxy {

enum class FailureReason : int32_t {
  kTimeout,    // a peer has acknowledged nothing for the timeout
  kBarrier,    // a peer has not come to a barrier within the timeout
  kPeer,       // the transport has lost a peer
  kEnded,      // a peer's process has ended
  kTransport,  // the transport has failed, or has reported what cannot be
  kImmediate,  // a peer has sent an immediate that no sender writes
  kCommand,    // a producer has pushed a command that this proxy cannot execute
  kProxy,      // the proxy's own thread has ended with an exception
};

struct Failure {
  FailureReason reason;
  int32_t rank;
  int32_t peer;  // -1 if it is no single peer's
  int32_t thread;
  // What was outstanding on the channel to `peer`, or on all channels.
  int64_t messages;       // in flight, and commands not sent yet
  int64_t bytes;          // in flight
  double seconds;         // how long nothing had moved on that channel
  std::string transport;  // its name
  std::string text;       // what happened, in words for a user
  // NOLINTNEXTLINE(readability-redundant-member-init): designated initialisers may leave it out
  std::string path = {};  // how the transport reaches the peer; empty if nothing is known
};

// Throws PeerTimeout for kTimeout, kBarrier and kEnded, and TransportError for the other reasons.
[[noreturn]] void raise(const Failure& failure);

}  // namespace fanfold::proxy
