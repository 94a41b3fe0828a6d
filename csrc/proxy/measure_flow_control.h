// Measures what credits are for: many senders of one receiver, on a modelled network
// (`fanfold bench flow-control`).
#pragma once

#include <cstdint>

#include "proxy/window.h"
#include "transport/loopback.h"

namespace fanfold::proxy {

struct IncastOptions {
  int32_t senders = 8;
  int64_t bytes = int64_t{16} << 20;        // of each sender, rounded up to whole chunks
  int64_t chunk_bytes = int64_t{64} << 10;  // of each command, a multiple of 16
  // That the receiver grants to each sender.
  Credit credit{.messages = kMostInFlight, .bytes = int64_t{512} << 10};
  transport::loopback::LinkOptions link;
  int64_t delay_ns = 5'000;  // from a write to its arrival, besides the links
};

struct Incast {
  int64_t bytes;      // that the receiver has got, each checked
  int64_t ns;         // from the first command until the last is acknowledged, of the model's time
  int64_t messages;   // writes of the network
  int64_t packets;    // sent, again ones included
  int64_t dropped;    // because the queue of the receiver's link was full
  int64_t queued;     // the most bytes in the queue of a link
  int64_t in_flight;  // the most bytes that one sender had in flight
};

// Every sender pushes its chunks into its proxy at once, and the proxies send them to rank 0. The
// threads are stepped in turns in the model's time, so the result depends on the options alone.
// Throws BadArgument.
Incast measure_incast(const IncastOptions& options);

}  // namespace fanfold::proxy
