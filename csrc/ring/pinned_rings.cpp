#include "ring/pinned_rings.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <string>
#include <thread>

#include "base/atomics.h"
#include "base/error.h"
#include "base/wait.h"

namespace fanfold {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMaxRings = 1024;
constexpr int32_t kMaxThreads = 256;
constexpr std::chrono::seconds kPatience{10};
// Of a ring, before a thread looks at its next one.
constexpr int kBatch = 32;

int64_t nanoseconds() {
  const auto since = Clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

int64_t views_bytes(int64_t count) {
  return align_up(count * static_cast<int64_t>(sizeof(RingView)), kAreaAlignment);
}

void check_range(const char* name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return;
  throw BadArgument(name, std::to_string(value), "1 to " + std::to_string(most));
}

}  // namespace

ClockPair compare_clocks(uint64_t* asked, const uint64_t* answered, uint64_t rounds) {
  ClockPair best{0, 0, INT64_MAX};
  for (uint64_t round = 1; round <= rounds; ++round) {
    const int64_t begin = nanoseconds();
    store_release_system(asked, round);
    const auto is_answered = [&] { return load_acquire_system(answered + 1) == round; };
    while (!is_answered()) {
      if (nanoseconds() - begin > std::chrono::nanoseconds(kPatience).count()) {
        throw Misuse("the GPU has not answered for " + std::to_string(kPatience.count()) + " s");
      }
      pause_briefly();
    }
    const int64_t end = nanoseconds();
    const auto gpu_ns = static_cast<int64_t>(load_acquire_system(answered));
    if (end - begin < best.round_trip_ns) best = {begin + (end - begin) / 2, gpu_ns, end - begin};
  }
  return best;
}

// ---- the rings ----------------------------------------------------------------------------------

int64_t PinnedRings::bytes(int64_t count, int64_t slots) {
  return views_bytes(count) + count * RingLayout{slots}.bytes();
}

PinnedRings::PinnedRings(std::byte* memory, int64_t bytes, int64_t count, int64_t slots,
                         RingHead* heads) {
  check_range("rings", count, kMaxRings);
  if (!RingLayout::allows(slots)) {
    throw BadArgument("slots", std::to_string(slots), "a power of two from 2 to 2^30");
  }
  if (bytes < PinnedRings::bytes(count, slots)) {
    throw BadArgument("bytes", std::to_string(bytes),
                      "at least " + std::to_string(PinnedRings::bytes(count, slots)));
  }
  views_ = reinterpret_cast<RingView*>(memory);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t size = RingLayout{slots}.bytes();
    const Ring ring = Ring::create_in(memory + views_bytes(count) + r * size, size, slots);
    RingView view = ring.view();
    view.head = heads + r;
    new (views_ + r) RingView(view);
    consumers_.emplace_back(ring);
  }
}

// ---- popping ------------------------------------------------------------------------------------

struct PinnedRings::Share {
  std::vector<size_t> rings;
  int64_t left = 0;             // commands to pop
  std::vector<int64_t> latest;  // of each producer of all rings, -1 before the first
  std::vector<Sample> samples;
  int64_t wrong = 0;
  int64_t first_ns = 0, last_ns = 0;
  std::exception_ptr failure;
};

void PinnedRings::use(Share& share, const Command& command, bool timed) {
  const NumberedCommand found = NumberedCommand::of(command);
  const auto number = static_cast<int64_t>(found.number);
  if (found.producer >= share.latest.size()) {
    ++share.wrong;
    return;
  }
  int64_t& latest = share.latest[found.producer];
  if (timed ? number < latest : number != latest + 1) ++share.wrong;
  latest = number;
  if (timed) share.samples.push_back({number, nanoseconds()});
}

void PinnedRings::pop_share(Share& share, int64_t commands, int64_t lanes, bool timed) {
  const auto count = consumers_.size();
  const auto producers = static_cast<int64_t>(share.latest.size());
  for (const size_t r : share.rings) {
    for (auto first = static_cast<int64_t>(r) * lanes; first < producers;
         first += static_cast<int64_t>(count) * lanes) {
      share.left += commands * std::min(lanes, producers - first);
    }
  }
  if (timed) share.samples.reserve(static_cast<size_t>(share.left));
  auto arrived = Clock::now();
  int64_t empty = 0;
  while (share.left > 0) {
    int64_t popped = 0;
    for (const size_t r : share.rings) {
      Consumer& consumer = consumers_[r];
      Command command;
      int here = 0;
      for (; here < kBatch && consumer.pop(command); ++here) {
        if (share.first_ns == 0) share.first_ns = nanoseconds();
        use(share, command, timed);
      }
      if (here > 0) consumer.publish();
      popped += here;
    }
    share.left -= popped;
    empty = popped > 0 ? 0 : empty + 1;
    if (empty == 0) continue;
    if (empty == 1) arrived = Clock::now();
    pause_briefly();
    if (empty % 1024 == 0 && Clock::now() - arrived > kPatience) {
      throw Misuse("no command has arrived for " + std::to_string(kPatience.count()) +
                   " s: " + std::to_string(share.left) + " of a thread's are missing");
    }
  }
  share.last_ns = nanoseconds();
}

RingThroughput PinnedRings::pop(int64_t producers, int64_t lanes, int64_t commands, int32_t threads,
                                bool timed) {
  check_range("threads", threads, kMaxThreads);
  check_range("lanes", lanes, 32);
  std::vector<Share> shares(std::min(static_cast<size_t>(threads), consumers_.size()));
  for (size_t r = 0; r < consumers_.size(); ++r) shares[r % shares.size()].rings.push_back(r);
  std::vector<std::thread> running;
  for (Share& share : shares) {
    share.latest.assign(static_cast<size_t>(producers), -1);
    running.emplace_back([this, &share, commands, lanes, timed] {
      try {
        pop_share(share, commands, lanes, timed);
      } catch (...) {
        share.failure = std::current_exception();
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  samples_.clear();
  int64_t wrong = 0, first_ns = INT64_MAX, last_ns = 0;
  for (Share& share : shares) {
    if (share.failure) std::rethrow_exception(share.failure);
    wrong += share.wrong;
    samples_.insert(samples_.end(), share.samples.begin(), share.samples.end());
    if (share.first_ns == 0) continue;  // none of its rings has a producer
    first_ns = std::min(first_ns, share.first_ns);
    last_ns = std::max(last_ns, share.last_ns);
  }
  if (wrong != 0) throw Misuse(std::to_string(wrong) + " commands were lost or out of order");
  return {producers * commands, static_cast<double>(last_ns - first_ns) * 1e-9};
}

RingLatency PinnedRings::latency(const ClockPair& before, const ClockPair& after) const {
  if (samples_.empty()) throw Misuse("there is no timed pop to take latencies from");
  const double speed = static_cast<double>(after.host_ns - before.host_ns) /
                       static_cast<double>(std::max<int64_t>(after.gpu_ns - before.gpu_ns, 1));
  std::vector<int64_t> latencies;
  latencies.reserve(samples_.size());
  int64_t first_ns = INT64_MAX, last_ns = INT64_MIN;
  for (const Sample& sample : samples_) {
    const auto since = static_cast<double>(sample.pushed_ns - before.gpu_ns) * speed;
    const int64_t pushed_ns = before.host_ns + static_cast<int64_t>(since);
    latencies.push_back(sample.arrived_ns - pushed_ns);
    first_ns = std::min(first_ns, pushed_ns);
    last_ns = std::max(last_ns, pushed_ns);
  }
  RingLatency found = summarize_latencies(latencies);
  found.clock_ns = static_cast<double>(std::max(before.round_trip_ns, after.round_trip_ns)) / 2;
  found.rate = static_cast<double>(samples_.size() - 1) /
               static_cast<double>(std::max<int64_t>(last_ns - first_ns, 1)) * 1e9;
  return found;
}

}  // namespace fanfold
