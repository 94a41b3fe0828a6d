#include "transport/loopback_plan.h"

#include <string>

#include "base/error.h"

namespace fanfold::transport::loopback {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 30;
constexpr int64_t kMostDelay = int64_t{1} << 50;  // 13 days; sums of a few do not overflow
constexpr int64_t kMostRails = 64;
constexpr int64_t kMostCount = int64_t{1} << 30;

void check_between(const std::string& name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return;
  throw BadArgument("loopback " + name, std::to_string(value),
                    "between " + std::to_string(least) + " and " + std::to_string(most));
}

void check_delay(const std::string& name, const Delay& delay) {
  check_between(name + ".least", delay.least, 0, kMostDelay);
  check_between(name + ".most", delay.most, delay.least, kMostDelay);
  check_between(name + ".rare_one_in", delay.rare_one_in, 0, kMostCount);
  check_between(name + ".rare", delay.rare, 0, kMostDelay);
}

uint64_t key_of(uint64_t seed, const WriteKey& key) {
  uint64_t mixed = Draw::mix(seed + 1);
  for (const int64_t part : {int64_t{key.source_rank}, int64_t{key.source_thread},
                             int64_t{key.target_rank}, int64_t{key.target_thread}, key.number}) {
    mixed = Draw::mix(mixed ^ (static_cast<uint64_t>(part) + 0x9e3779b97f4a7c15u));
  }
  return mixed;
}

}  // namespace

Options Options::hostile(uint64_t seed) {
  Options options;
  options.seed = seed;
  options.writes = 32;
  options.poll_ns = 500;
  options.delay = {.least = 1'000, .most = 20'000, .rare_one_in = 50, .rare = 200'000};
  options.in_order = false;
  options.again_one_in = 16;
  options.duplicate_one_in = 8;
  options.duplicate_delay = {.least = 0, .most = 20'000};
  options.piece_bytes = 1024;
  options.completions = Completions::kDrawn;
  options.completion_delay = {.least = 0, .most = 40'000};
  options.source_read = SourceRead::kDrawn;
  options.stall_one_in = 200;
  options.stall = {.least = 10'000, .most = 100'000};
  return options;
}

// Always draws the same numbers in the same order, so that an option changes nothing but its own
// effect.
Plan plan_write(const Options& options, const WriteKey& key) {
  Draw draw(key_of(options.seed, key));
  const bool coin_completion = draw.one_in(2);
  const bool coin_read = draw.one_in(2);
  const bool coin_rails = draw.one_in(2);
  const uint64_t pieces_key = draw.next();
  // Each delay has its own key, since a rare delay draws more numbers than others.
  const auto drawn = [&](const Delay& delay) { return Draw(draw.next()).delay(delay); };
  const bool early = options.completions == Completions::kBeforeLanding ||
                     (options.completions == Completions::kDrawn && coin_completion);
  const bool at_write = options.source_read == SourceRead::kAtWrite ||
                        (options.source_read == SourceRead::kDrawn && coin_read);
  Plan plan{.delay = drawn(options.delay),
            .duplicated = false,
            .duplicate_delay = drawn(options.duplicate_delay),
            .completes_early = early,
            .completion_delay = drawn(options.completion_delay),
            .read_at_write = at_write,
            .stalls = false,
            .stalls_all_rails = coin_rails,
            .stall = drawn(options.stall),
            .pieces_key = pieces_key};
  plan.duplicated = Draw(draw.next()).one_in(options.duplicate_one_in);
  plan.stalls = Draw(draw.next()).one_in(options.stall_one_in);
  return plan;
}

void check_options(const Options& options) {
  check_between("rails", options.rails, 1, kMostRails);
  check_between("writes", options.writes, 1, kMostCount);
  check_between("write_bytes", options.write_bytes, 1, kMostBytes);
  check_between("poll_ns", options.poll_ns, 0, kMostDelay);
  check_between("again_one_in", options.again_one_in, 0, kMostCount);
  if (options.again_one_in == 1) {
    throw BadArgument("loopback again_one_in", "1", "0 or at least 2, or no write ever starts");
  }
  check_between("duplicate_one_in", options.duplicate_one_in, 0, kMostCount);
  check_between("stall_one_in", options.stall_one_in, 0, kMostCount);
  check_between("piece_bytes", options.piece_bytes, 0, kMostBytes);
  check_between("receive_queue", options.receive_queue, 0, kMostCount);
  check_between("detect_ns", options.detect_ns, 0, kMostDelay);
  check_between("retry_ns", options.retry_ns, 0, kMostDelay);
  check_delay("delay", options.delay);
  check_delay("duplicate_delay", options.duplicate_delay);
  check_delay("completion_delay", options.completion_delay);
  check_delay("stall", options.stall);
  const LinkOptions& link = options.link;
  check_between("link.bytes_per_us", link.bytes_per_us, 0, kMostBytes);
  check_between("link.buffer_bytes", link.buffer_bytes, 0, kMostDelay);
  check_between("link.packet_bytes", link.packet_bytes, 1, kMostBytes);
  check_between("link.header_bytes", link.header_bytes, 0, kMostBytes);
  check_between("link.retransmit_ns", link.retransmit_ns, 1, kMostDelay);
  if (link.buffer_bytes != 0) {
    // A packet that fits never would be resent for ever.
    check_between("link.buffer_bytes", link.buffer_bytes, link.packet_bytes + link.header_bytes,
                  kMostDelay);
  }
  for (const WriteError& error : options.write_errors) {
    check_between("write_errors.number", error.number, 1, INT64_MAX);
  }
}

}  // namespace fanfold::transport::loopback
