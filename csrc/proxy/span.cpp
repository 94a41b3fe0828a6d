#include "proxy/span.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "layout/immediate.h"

namespace fanfold::proxy {
namespace {

void check_at_least(const char* name, int64_t value, int64_t bound) {
  if (value >= bound) return;
  throw BadArgument(name, std::to_string(value), "at least " + std::to_string(bound));
}

}  // namespace

void check_limits(const SpanLimits& limits) {
  check_at_least("part_bytes", limits.part_bytes, 1);
  check_at_least("message_bytes", limits.message_bytes, limits.part_bytes);
  check_at_least("message_parts", limits.message_parts, 1);
  check_at_least("rails", limits.rails, 1);
}

bool coalesce(Span& run, const Span& next, const SpanLimits& limits) {
  if (run.counter != next.counter || run.source_offset + run.bytes != next.source_offset ||
      run.target_offset + run.bytes != next.target_offset ||
      run.bytes + next.bytes > limits.message_bytes ||
      run.parts + next.parts > limits.message_parts) {
    return false;
  }
  run.bytes += next.bytes;
  run.parts += next.parts;
  return true;
}

int64_t parts_each(const Span& span, const SpanLimits& limits) {
  // The parts of coalesced commands have no common size, so their span stays one message.
  if (span.parts != parts_of(span.bytes, limits.part_bytes)) return span.parts;
  const int64_t most = std::min(limits.message_parts, limits.message_bytes / limits.part_bytes);
  return std::clamp<int64_t>(ceil_div(span.parts, limits.rails), 1, most);
}

Span split(Span& span, int64_t parts, int64_t part_bytes) {
  Span message = span;
  if (parts < span.parts) {
    message.parts = parts;
    message.bytes = parts * part_bytes;
  }
  span.source_offset += message.bytes;
  span.target_offset += message.bytes;
  span.bytes -= message.bytes;
  span.parts -= message.parts;
  return message;
}

}  // namespace fanfold::proxy
