// The exceptions of the core. Each carries its details as fields. The bindings translate them into
// the Python exceptions of fanfold/errors.py, which compose the messages.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace fanfold {

// The caller passed a value outside its bound.
struct BadArgument : std::runtime_error {
  BadArgument(std::string argument_, std::string value_, std::string bound_)
      : std::runtime_error(argument_ + " is " + value_ + ", but must be " + bound_),
        argument(std::move(argument_)), value(std::move(value_)), bound(std::move(bound_)) {}

  std::string argument;
  std::string value;
  std::string bound;
};

// The error for a value that must be the same on all ranks and differs on `rank` and `peer`.
BadArgument disagreement(const std::string& name, int64_t ours, int32_t rank, int64_t theirs,
                         int32_t peer);

// The error for ranks that deadlock in different calls: `rank` waits in the call `ours`, `peer` in
// the call `theirs`. Both strings name a call with its number.
BadArgument different_calls(const std::string& ours, int32_t rank, const std::string& theirs,
                            int32_t peer);

struct TimeoutReport {
  int32_t rank;
  int32_t peer;
  std::string phase;
  int64_t expected;
  int64_t actual;
  double seconds;
  bool peer_gone;  // the peer's process has ended
  // NOLINTNEXTLINE(readability-redundant-member-init): designated initialisers may leave it out
  std::string path = {};  // how the peer is reached over the network; empty if nothing is known
};

// A peer did not send an awaited signal within the timeout.
struct PeerTimeout : std::runtime_error {
  explicit PeerTimeout(TimeoutReport report_)
      : std::runtime_error("peer timeout in " + report_.phase), report(std::move(report_)) {}

  TimeoutReport report;
};

struct TransportReport {
  int32_t rank;
  int32_t peer;           // -1 if no single peer is concerned
  std::string transport;  // its name, such as "libfabric:tcp"
  std::string what;       // what happened, in the transport's or the proxy's words
  int64_t messages;       // outstanding then
  int64_t bytes;          // outstanding then
  double seconds;         // how long nothing had moved
  // NOLINTNEXTLINE(readability-redundant-member-init): designated initialisers may leave it out
  std::string path = {};  // how the peer is reached over the network; empty if nothing is known
};

// The network between hosts has failed, or has lost a peer.
struct TransportError : std::runtime_error {
  explicit TransportError(TransportReport report_)
      : std::runtime_error(report_.transport + ": " + report_.what), report(std::move(report_)) {}

  TransportReport report;
};

struct RefusalReport {
  int32_t rank;
  int32_t peer;
  std::string phase;
  std::string reason;
};

// A peer refused its own input, so every rank aborts the call.
struct PeerRefused : std::runtime_error {
  explicit PeerRefused(RefusalReport report_)
      : std::runtime_error("peer refused its input in " + report_.phase),
        report(std::move(report_)) {}

  RefusalReport report;
};

struct SignalReport {
  int32_t rank;
  std::string phase;
  int32_t expert;  // of this rank's
  int32_t block;   // of the expert's rows
  int64_t value;
  int64_t expected;
  double seconds;
};

// The signal of outputs that combine waits for did not come within the timeout: whatever computes
// them on this rank is late or has failed.
struct SignalTimeout : std::runtime_error {
  explicit SignalTimeout(SignalReport report_)
      : std::runtime_error("signal timeout in " + report_.phase), report(std::move(report_)) {}

  SignalReport report;
};

struct RingFullReport {
  int64_t slots;
  uint64_t pushed;    // the next ticket: the commands that producers have pushed
  uint64_t consumed;  // the count that the consumer has published
  double seconds;     // how long the push has waited
};

// A ring of commands stayed full: its consumer is late or has stopped. The push changed nothing.
struct RingFull : std::runtime_error {
  explicit RingFull(RingFullReport report_);

  RingFullReport report;
};

// The caller used an object in an order or at a time that the object does not allow.
struct Misuse : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A system call failed.
struct SystemFailure : std::runtime_error {
  SystemFailure(const std::string& what, int error_number);

  int error_number;
};

// This machine lacks a driver or a library; the message names what to install or change.
struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct DriverFailureReport {
  std::string call;  // the driver's function
  std::string what;  // the request, with its values
  std::string name;  // the driver's name of the error
  std::string text;  // the driver's description of the error
};

// A call of the CUDA driver failed.
struct DriverFailure : std::runtime_error {
  explicit DriverFailure(DriverFailureReport report_)
      : std::runtime_error(report_.call + " fails: " + report_.name), report(std::move(report_)) {}

  DriverFailureReport report;
};

}  // namespace fanfold
