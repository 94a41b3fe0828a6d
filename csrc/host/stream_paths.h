// The streams of the high-throughput mode: where each ring and each of its signals lies.
//
// On one host a stream lies in the memory of its writer, and readers map it.
//
// Between hosts a dispatch sends a token once to each host: the ring lies in the memory of the
// source's gateway there, and all ranks of the host read it. A combine goes back the same way: the
// ranks of a host stream their rows to the source's gateway among them, which sums the rows of a
// token and streams the sums to a ring in the source's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "host/exchange.h"
#include "host/stream.h"

namespace fanfold {

// The rings that the staging memory of a rank is divided into have this size.
int64_t dispatch_ring_bytes(const Exchange& exchange);
int64_t combine_ring_bytes(const Exchange& exchange);

// The ranks of a host but for this one, each rank beginning with its successor.
std::vector<int32_t> others_on(const Exchange& exchange, int32_t host);

// A dispatch: from this rank to the other ranks of `host`, and from `source` to this rank.
OutgoingPath dispatch_to(const Exchange& exchange, int32_t host);
IncomingPath dispatch_from(const Exchange& exchange, int32_t source);

// A combine: this rank's rows for `source`, to the source or, on another host, to its gateway here.
OutgoingPath rows_to(const Exchange& exchange, int32_t source);
// The rows of `peer`, on this host, for this rank.
IncomingPath rows_from(const Exchange& exchange, int32_t peer);
// The rows of `peer`, on this host, for `source`, whose gateway this rank is.
IncomingPath rows_for(const Exchange& exchange, int32_t peer, int32_t source);
// The sums of this host for `source`, whose gateway this rank is; and those of another host for
// this rank.
OutgoingPath sums_to(const Exchange& exchange, int32_t source);
IncomingPath sums_from(const Exchange& exchange, int32_t host);

}  // namespace fanfold
