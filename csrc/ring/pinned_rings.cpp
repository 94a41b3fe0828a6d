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
constexpr int64_t kMaxLanes = 32;
constexpr int64_t kMaxProducers = 1 << 20;
constexpr int64_t kMaxCommands = 1'000'000'000;
constexpr std::chrono::seconds kPatience{10};
// Commands of a ring that a thread pops before it goes on to its next one.
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
  check_range("rings", count, kMaxRings);
  if (!RingLayout::allows(slots)) {
    throw BadArgument("slots", std::to_string(slots), "a power of two from 2 to 2^30");
  }
  return views_bytes(count) + count * RingLayout{slots}.bytes();
}

struct alignas(kAreaAlignment) PinnedRings::PopThread {
  std::vector<size_t> rings;
  int64_t left = 0;             // commands to pop
  std::vector<int64_t> latest;  // of each producer of all rings, -1 before the first
  std::vector<Sample> samples;  // as many as there will be, if they are timed
  size_t noted = 0;             // of them
  int64_t wrong = 0;
  int64_t first_ns = 0, last_ns = 0;
  std::exception_ptr failure;
};

PinnedRings::PinnedRings(std::byte* memory, int64_t bytes, int64_t count, int64_t slots,
                         RingHead* heads) {
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
    consumers_.push_back({Consumer(ring)});
  }
}

PinnedRings::~PinnedRings() = default;

// ---- popping ------------------------------------------------------------------------------------

void PinnedRings::prepare(const PushedCommands& commands, int32_t threads) {
  check_range("threads", threads, kMaxThreads);
  check_range("lanes", commands.lanes, kMaxLanes);
  check_range("producers", commands.producers, kMaxProducers);
  check_range("commands", commands.each, kMaxCommands);
  expected_ = commands;
  const size_t count = consumers_.size();
  threads_ = std::vector<PopThread>(std::min(static_cast<size_t>(threads), count));
  for (size_t r = 0; r < count; ++r) {
    PopThread& thread = threads_[r % threads_.size()];
    thread.rings.push_back(r);
    for (auto first = static_cast<int64_t>(r) * commands.lanes; first < commands.producers;
         first += static_cast<int64_t>(count) * commands.lanes) {
      thread.left += commands.each * std::min(commands.lanes, commands.producers - first);
    }
  }
  for (PopThread& thread : threads_) {
    thread.latest.assign(static_cast<size_t>(commands.producers), -1);
    // Written, so that no page comes while commands do.
    if (commands.timed) thread.samples.assign(static_cast<size_t>(thread.left), Sample{});
  }
}

void PinnedRings::use(PopThread& thread, const Command& command) const {
  const NumberedCommand found = NumberedCommand::of(command);
  const auto number = static_cast<int64_t>(found.number);
  if (found.producer >= thread.latest.size()) {
    ++thread.wrong;
    return;
  }
  int64_t& latest = thread.latest[found.producer];
  if (expected_.timed ? number < latest : number != latest + 1) ++thread.wrong;
  latest = number;
  if (expected_.timed) thread.samples[thread.noted++] = {number, nanoseconds()};
}

void PinnedRings::pop_rings(PopThread& thread) {
  auto arrived = Clock::now();
  int64_t empty = 0;
  while (thread.left > 0) {
    int64_t popped = 0;
    for (const size_t r : thread.rings) {
      Consumer& consumer = consumers_[r].consumer;
      Command command;
      int here = 0;
      for (; here < kBatch && consumer.pop(command); ++here) {
        if (thread.first_ns == 0) thread.first_ns = nanoseconds();
        use(thread, command);
      }
      if (here > 0) consumer.publish();
      popped += here;
    }
    thread.left -= popped;
    empty = popped > 0 ? 0 : empty + 1;
    if (empty == 0) continue;
    if (empty == 1) arrived = Clock::now();
    pause_or_yield(empty);
    if (empty % 1024 != 0 || Clock::now() - arrived < kPatience) continue;
    uint64_t abandoned = 0;
    for (const size_t r : thread.rings) abandoned += consumers_[r].consumer.abandoned();
    throw Misuse("no command has arrived for " + std::to_string(kPatience.count()) + " s: " +
                 std::to_string(thread.left) + " of a thread's are missing, and producers have " +
                 "given up " + std::to_string(abandoned) + " for want of room");
  }
  thread.last_ns = nanoseconds();
}

RingThroughput PinnedRings::pop() {
  {
    std::vector<std::jthread> running;
    running.reserve(threads_.size());
    for (PopThread& thread : threads_) {
      running.emplace_back([this, &thread] {
        try {
          pop_rings(thread);
        } catch (...) {
          thread.failure = std::current_exception();
        }
      });
    }
  }
  samples_.clear();
  int64_t wrong = 0, first_ns = INT64_MAX, last_ns = 0;
  for (PopThread& thread : threads_) {
    if (thread.failure) std::rethrow_exception(thread.failure);
    wrong += thread.wrong;
    samples_.insert(samples_.end(), thread.samples.begin(), thread.samples.end());
    if (thread.first_ns == 0) continue;  // none of its rings has a producer
    first_ns = std::min(first_ns, thread.first_ns);
    last_ns = std::max(last_ns, thread.last_ns);
  }
  if (wrong != 0) throw Misuse(std::to_string(wrong) + " commands were lost or out of order");
  return {expected_.producers * expected_.each, static_cast<double>(last_ns - first_ns) * 1e-9};
}

RingLatency PinnedRings::latency(const ClockPair& before, const ClockPair& after) const {
  if (samples_.empty()) throw Misuse("there is no timed pop to take latencies from");
  if (after.gpu_ns <= before.gpu_ns || after.host_ns <= before.host_ns) {
    throw Misuse("the second moment is not behind the first one on both clocks");
  }
  const double speed = static_cast<double>(after.host_ns - before.host_ns) /
                       static_cast<double>(after.gpu_ns - before.gpu_ns);
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
