#include "ring/measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/wait.h"
#include "layout/ring_bench.h"
#include "ring/ring.h"

namespace fanfold {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int32_t kMaxProducers = 64;
constexpr int64_t kMaxCommands = 1'000'000'000;
constexpr int64_t kMaxSamples = 20'000'000;
constexpr double kMaxRate = 1e9;
// The consumer publishes at least once for so many commands, as a proxy does for a batch.
constexpr uint64_t kBatch = 64;
// Longer than the system takes the core from a thread.
constexpr std::chrono::seconds kPatience{10};
// When the consumer has popped all there is, it leaves the ring alone for so long, as a proxy does
// that polls its network in between. If it polled on, it would take the cache line away from the
// producer between any two commands.
constexpr std::chrono::nanoseconds kRest{200};
// Polls without a command, some 20 us, after which the consumer looks at the clock and lets other
// threads run: where the producer has no core of its own, it needs this one.
constexpr uint32_t kPolls = 1u << 14;

int64_t nanoseconds() {
  const auto since = Clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

void check_range(const char* name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return;
  throw BadArgument(name, std::to_string(value), "1 to " + std::to_string(most));
}

Command numbered(int32_t producer, int64_t number) {
  return NumberedCommand{static_cast<uint64_t>(producer), static_cast<uint64_t>(number)}.command();
}
int64_t number_of(const Command& command) {
  return static_cast<int64_t>(NumberedCommand::of(command).number);
}

// Threads that push. The first failure of one of them is thrown to the consumer.
class Producers {
 public:
  Producers(int32_t count, const std::function<void(int32_t)>& body)
      : failures_(static_cast<size_t>(count)) {
    threads_.reserve(failures_.size());
    try {
      for (int32_t i = 0; i < count; ++i) threads_.emplace_back([this, i, body] { run(i, body); });
    } catch (...) {
      join();
      throw;
    }
  }
  Producers(const Producers&) = delete;
  Producers& operator=(const Producers&) = delete;
  ~Producers() { join(); }

  bool failed() const { return failed_; }

  void finish() {
    join();
    for (const std::exception_ptr& failure : failures_) {
      if (failure) std::rethrow_exception(failure);
    }
  }

 private:
  void run(int32_t index, const std::function<void(int32_t)>& body) {
    try {
      body(index);
    } catch (...) {
      failures_[static_cast<size_t>(index)] = std::current_exception();
      failed_ = true;
    }
  }
  void join() {
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }

  std::vector<std::exception_ptr> failures_;
  std::atomic<bool> failed_ = false;
  std::vector<std::thread> threads_;
};

// Pops `commands` and calls `use` for each. Ends early if a producer has failed; throws Misuse if
// no command arrives for kPatience.
template <typename Use>
void consume(Consumer& consumer, int64_t commands, const Producers& producers, const Use& use) {
  uint32_t polls = 0;
  bool fresh = false;  // a command has been popped since the last rest
  auto arrived = Clock::now();
  int64_t popped_then = 0;
  for (int64_t popped = 0; popped < commands;) {
    Command command;
    if (consumer.pop(command)) {
      ++popped;
      fresh = true;
      use(command);
      if (consumer.popped() - consumer.published() >= kBatch) consumer.publish();
      continue;
    }
    if (consumer.popped() != consumer.published()) consumer.publish();
    if (fresh) {
      for (const auto until = Clock::now() + kRest; Clock::now() < until;) pause_briefly();
      fresh = false;
    }
    if (++polls % kPolls != 0) continue;
    if (producers.failed()) return;
    std::this_thread::yield();
    const auto now = Clock::now();
    if (popped != popped_then) arrived = now;
    popped_then = popped;
    if (now - arrived > kPatience) {
      throw Misuse("no command has arrived for " + std::to_string(kPatience.count()) +
                   " s: the producers get no time to run");
    }
  }
  consumer.publish();
}

double clock_cost() {
  constexpr int kReads = 10000;
  const int64_t start = nanoseconds();
  int64_t last = start;
  for (int i = 0; i < kReads; ++i) last = nanoseconds();
  return static_cast<double>(last - start) / kReads;
}

}  // namespace

RingLatency summarize_latencies(std::vector<int64_t>& latencies) {
  std::sort(latencies.begin(), latencies.end());
  const auto count = static_cast<int64_t>(latencies.size());
  const auto at = [&](int64_t percent) {
    return latencies[static_cast<size_t>((count - 1) * percent / 100)];
  };
  const double sum = std::accumulate(latencies.begin(), latencies.end(), 0.0);
  return {.commands = count,
          .rate = 0.0,
          .clock_ns = 0.0,
          .average_ns = sum / static_cast<double>(count),
          .p50_ns = at(50),
          .p99_ns = at(99),
          .most_ns = latencies.back()};
}

RingThroughput measure_ring_throughput(int64_t slots, int32_t producers, int64_t commands) {
  check_range("producers", producers, kMaxProducers);
  check_range("commands", commands, kMaxCommands);
  const Ring ring = Ring::create(slots);
  Producer producer(ring);
  Consumer consumer(ring);
  const int64_t each = ceil_div(commands, producers);
  Producers threads(producers, [&](int32_t index) {
    for (int64_t i = 0; i < each; ++i) producer.push(numbered(index, i), kPatience);
  });
  std::vector<int64_t> next(static_cast<size_t>(producers), 0);
  int64_t wrong = 0;
  const auto start = Clock::now();
  consume(consumer, each * producers, threads, [&](const Command& command) {
    wrong +=
        number_of(command) == next[NumberedCommand::of(command).producer % next.size()]++ ? 0 : 1;
  });
  const std::chrono::duration<double> took = Clock::now() - start;
  threads.finish();
  if (wrong != 0) throw Misuse(std::to_string(wrong) + " commands were lost or out of order");
  return {each * producers, took.count()};
}

RingLatency measure_ring_latency(int64_t slots, double rate, int64_t commands) {
  check_range("commands", commands, kMaxSamples);
  if (!(rate >= 1.0 && rate <= kMaxRate)) {
    throw BadArgument("rate", std::to_string(rate), "1 to 1e9 commands per second");
  }
  const Ring ring = Ring::create(slots);
  Producer producer(ring);
  Consumer consumer(ring);
  std::vector<int64_t> latencies(static_cast<size_t>(commands));
  int64_t last_push = 0;
  const int64_t start = nanoseconds() + 1'000'000;  // the thread exists by then
  Producers thread(1, [&](int32_t) {
    for (int64_t i = 0; i < commands; ++i) {
      const int64_t due = start + static_cast<int64_t>(static_cast<double>(i) / rate * 1e9);
      int64_t now = nanoseconds();
      while (now < due) now = nanoseconds();
      producer.push(numbered(0, now), kPatience);
      last_push = now;
    }
  });
  int64_t popped = 0;
  consume(consumer, commands, thread, [&](const Command& command) {
    latencies[static_cast<size_t>(popped++)] = nanoseconds() - number_of(command);
  });
  thread.finish();
  RingLatency result = summarize_latencies(latencies);
  result.clock_ns = clock_cost();
  const auto took = static_cast<double>(std::max<int64_t>(last_push - start, 1));
  result.rate = static_cast<double>(commands - 1) / took * 1e9;
  return result;
}

}  // namespace fanfold
