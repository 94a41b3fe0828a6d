// The failures the core can report. Each carries its facts as fields; the bindings turn them into
// the Python exceptions of fanfold/errors.py, which word them.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace fanfold {

// A value that the caller passed is outside its bound.
struct BadArgument : std::runtime_error {
  BadArgument(std::string argument_, std::string value_, std::string bound_)
      : std::runtime_error(argument_ + " is " + value_ + ", but must be " + bound_),
        argument(std::move(argument_)), value(std::move(value_)), bound(std::move(bound_)) {}

  std::string argument;
  std::string value;
  std::string bound;
};

// `rank` and `peer` bring other values of what must be the same on all ranks.
BadArgument disagreement(const std::string& name, int64_t ours, int32_t rank, int64_t theirs,
                         int32_t peer);

// `rank` is in `ours` and `peer` in `theirs`, calls with their numbers; each waits for the other.
BadArgument different_calls(const std::string& ours, int32_t rank, const std::string& theirs,
                            int32_t peer);

struct TimeoutFacts {
  int32_t rank;
  int32_t peer;
  std::string phase;
  int64_t expected;
  int64_t actual;
  double seconds;
  bool peer_gone;  // the peer's process has ended
};

// A peer did not arrive within the configured bound.
struct PeerTimeout : std::runtime_error {
  explicit PeerTimeout(TimeoutFacts facts_)
      : std::runtime_error("peer timeout in " + facts_.phase), facts(std::move(facts_)) {}

  TimeoutFacts facts;
};

struct RefusalFacts {
  int32_t rank;
  int32_t peer;
  std::string phase;
  std::string reason;
};

// A peer refused its own input, so the whole call is void on every rank.
struct PeerRefused : std::runtime_error {
  explicit PeerRefused(RefusalFacts facts_)
      : std::runtime_error("peer refused its input in " + facts_.phase), facts(std::move(facts_)) {}

  RefusalFacts facts;
};

// An object was used in an order or at a time that it does not allow.
struct Misuse : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The operating system refused something.
struct SystemFailure : std::runtime_error {
  SystemFailure(const std::string& what, int error_number);

  int error_number;
};

// This machine lacks something; the message says what to install or change.
struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct DriverFailureFacts {
  std::string call;  // the driver's function
  std::string what;  // what was asked of it, with its values
  std::string name;  // the driver's name of the error
  std::string text;  // the driver's words for it
};

// A GPU's driver refused something.
struct DriverFailure : std::runtime_error {
  explicit DriverFailure(DriverFailureFacts facts_)
      : std::runtime_error(facts_.call + " fails: " + facts_.name), facts(std::move(facts_)) {}

  DriverFailureFacts facts;
};

}  // namespace fanfold
