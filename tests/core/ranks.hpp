// Threads as ranks, and random numbers for their workloads.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/wait.h"
#include "memory/symmetric.h"

namespace fanfold {

// Sanitized code is ten times slower, so it runs a tenth of the rounds.
#if defined(FANFOLD_SANITIZED)
inline constexpr int kRoundsShare = 10;
#else
inline constexpr int kRoundsShare = 1;
#endif

// Far beyond any real wait, so that only a protocol that hangs times out.
inline constexpr double kLongTimeoutSeconds = 30.0;

// splitmix64: the same numbers on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // Between `low` and `high`, both included.
  int32_t between(int32_t low, int32_t high) {
    return low + static_cast<int32_t>(next() % static_cast<uint64_t>(int64_t{high} - low + 1));
  }
  bool one_in(int32_t n) { return between(1, n) == 1; }
  float real(float low, float high) {
    return low + (high - low) * (static_cast<float>(next() >> 40) / 16777216.0f);
  }

 private:
  uint64_t state_;
};

inline SymmetricOptions options_for(int32_t ranks, int64_t bytes,
                                    double timeout_seconds = kLongTimeoutSeconds) {
  return SymmetricOptions{.rank = 0,
                          .ranks = ranks,
                          .bytes = bytes,
                          .timeout_seconds = timeout_seconds,
                          .spin_seconds = 0.0,
                          .mask_late_peers = false};
}

using Group = std::vector<std::unique_ptr<SymmetricMemory>>;

// Ranks that map each other's memory through /proc, as ranks of different processes do.
inline Group mapped_group(const SymmetricOptions& options) {
  Group group;
  std::vector<PeerAddress> addresses;
  for (int32_t rank = 0; rank < options.ranks; ++rank) {
    SymmetricOptions own = options;
    own.rank = rank;
    group.push_back(std::make_unique<SymmetricMemory>(own));
    addresses.push_back(group.back()->address());
  }
  for (const auto& memory : group) memory->map(addresses);
  for (const auto& memory : group) memory->seal();
  return group;
}

// Waits for one signal as a mode does. PeerTimeout reports the epoch of that signal as `actual`.
inline bool wait_for_signal(SymmetricMemory& memory, Phase phase, int32_t peer, int64_t offset,
                            uint32_t epoch) {
  const AwaitedSignal awaited{.peer = peer,
                              .phase = phase,
                              .call = epoch,
                              .epoch = epoch,
                              .offset = offset,
                              .alternative = offset};
  return memory.wait(awaited, [&] { return memory.peek(offset).epoch; });
}

// Waits of the other ranks throw this once one rank of a test has failed.
struct AnotherRankFailed {};

// Ranks failures by their distance from the cause: a timeout, and AnotherRankFailed even more, may
// only follow from the failure of another rank.
inline int distance_from_cause(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const AnotherRankFailed&) {
    return 2;
  } catch (const PeerTimeout&) {
    return 1;
  } catch (...) {
    return 0;
  }
}

// Runs body(rank) on a thread for each rank. Rethrows the failure that is closest to the cause.
inline void on_ranks(int32_t ranks, const std::function<void(int32_t)>& body) {
  static std::atomic<bool> failed;
  failed = false;
  set_interrupt_check([] {
    // NOLINTNEXTLINE(bugprone-std-exception-baseclass): no handler may catch it by accident.
    if (failed) throw AnotherRankFailed{};
  });
  std::vector<std::exception_ptr> failures(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  threads.reserve(failures.size());
  for (int32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        failures[static_cast<size_t>(rank)] = std::current_exception();
        failed = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  set_interrupt_check(nullptr);
  for (int remote = 0; remote < 2; ++remote) {
    for (const std::exception_ptr& failure : failures) {
      if (failure && distance_from_cause(failure) == remote) std::rethrow_exception(failure);
    }
  }
}

}  // namespace fanfold
