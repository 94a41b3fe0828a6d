// Times Fanfold's transport and plain libfabric between two processes, in turns.
//
// Both sides use the same provider, NIC and options, and the same loops; they differ in the calls
// between the loop and libfabric. "Plain" is fi_writedata (fi_inject_writedata where the bytes fit)
// and fi_cq_read on objects of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace fanfold::transport {

enum class Wire { kPlain, kFanfold };

struct RoundTrips {
  double p50_seconds;
  double p99_seconds;
};

struct Stream {
  int64_t bytes;   // of each write
  int64_t writes;  // a multiple of half of the window
  int64_t window;  // writes in flight; even
};

// One of the two ranks. Both must make the same calls in the same order. Calls throw PeerTimeout if
// the peer does not answer for `timeout_seconds`, and Unavailable if a write fails.
class NetworkBench {
 public:
  // `setting` as in `parse_setting`; `most_bytes` bounds the size of a write.
  NetworkBench(const std::string& setting, int32_t rank, int64_t most_bytes,
               double timeout_seconds);
  ~NetworkBench();
  NetworkBench(const NetworkBench&) = delete;
  NetworkBench& operator=(const NetworkBench&) = delete;

  const std::string& name() const;
  std::vector<std::byte> address() const;
  void connect(const std::vector<std::byte>& address);

  // Sends a write to and fro `rounds` times. On rank 0 the times of whole round trips.
  RoundTrips ping_pong(Wire wire, int64_t bytes, int64_t rounds);
  // Rank 0 writes as fast as it can, at most two windows ahead of what the peer has seen. Returns
  // the seconds until the peer has seen all.
  double stream(Wire wire, const Stream& stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fanfold::transport
