// How write commands become messages. Pure functions, because both the number of messages and the
// counts that the peer waits for follow from them.
#pragma once

#include <cstdint>

namespace fanfold::proxy {

// Bytes of one write command, or of several that are contiguous at both ends, to one peer.
struct Span {
  int32_t counter;
  int64_t source_offset;
  int64_t target_offset;
  int64_t bytes;
  int64_t parts;  // what the counter grows by

  bool operator==(const Span&) const = default;
};

struct SpanLimits {
  int64_t part_bytes;
  int64_t message_bytes;  // of one message; at least part_bytes
  int64_t message_parts;  // of one message; at least 1
  int32_t rails;          // over which a large command is spread; at least 1
};

// Throws BadArgument if a limit is out of bounds.
void check_limits(const SpanLimits& limits);

// Appends `next` to `run` if both go to one counter, `next` begins where `run` ends at both ends,
// and both together fit into one message. Returns whether it did.
bool coalesce(Span& run, const Span& next, const SpanLimits& limits);

// How many parts of `span` one message takes: all of them if they are few, and otherwise so many
// that every rail gets a message and none is too large.
int64_t parts_each(const Span& span, const SpanLimits& limits);

// Takes a message of `parts` parts, or of all that are left, from the front of `span`.
Span split(Span& span, int64_t parts, int64_t part_bytes);

}  // namespace fanfold::proxy
