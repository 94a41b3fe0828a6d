#include "proxy/options.h"

#include <string>

#include "base/error.h"

namespace fanfold::proxy {
namespace {

constexpr int32_t kMostThreads = 64;
constexpr int64_t kMostPartBytes = int64_t{1} << 30;

void check_between(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  throw BadArgument(name, std::to_string(value),
                    "from " + std::to_string(low) + " to " + std::to_string(high));
}

}  // namespace

void check_options(const ProxyOptions& options) {
  check_between("ranks", options.ranks, 1, kMostProxyRanks);
  check_between("rank", options.rank, 0, options.ranks - 1);
  check_between("threads", options.threads, 1, kMostThreads);
  check_between("part_bytes", options.part_bytes, kRowAlignment, kMostPartBytes);
  if (options.part_bytes % kRowAlignment != 0) {
    throw BadArgument("part_bytes", std::to_string(options.part_bytes),
                      "a multiple of " + std::to_string(kRowAlignment));
  }
  check_between("message_bytes", options.message_bytes, options.part_bytes, kMostPartBytes);
  check_credit(options.credit);
  check_between("credit.bytes", options.credit.bytes, options.part_bytes, INT64_MAX);
  check_between("awake", options.awake.count(), 0, INT64_MAX);
  check_between("timeout", options.timeout.count(), 1, INT64_MAX);
  check_between("idle_sleep", options.idle_sleep.count(), 0,
                std::chrono::nanoseconds(std::chrono::milliseconds(1)).count());
}

}  // namespace fanfold::proxy
