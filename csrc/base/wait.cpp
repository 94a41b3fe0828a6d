#include "base/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <ctime>
#include <thread>

#include "base/atomics.h"

namespace fanfold {
namespace {

using Clock = std::chrono::steady_clock;

// A yield costs about a microsecond if no other thread wants the core.
constexpr int kYields = 64;

// Empty polls of a polling thread before its first yield.
constexpr int64_t kPauses = 64;

// If two polls lie further apart than this plus the sleep, the process did not run in between (it
// was stopped, or the machine was suspended). Such a gap counts towards the timeout only up to this
// bound, because the peers may have been suspended too.
constexpr auto kLongestGap = std::chrono::seconds(1);

std::atomic<InterruptCheck> g_interrupt_check{nullptr};

// Without FUTEX_PRIVATE_FLAG, because several processes share the word.
void futex_wait(uint32_t* word, uint32_t seen, std::chrono::nanoseconds at_most) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(at_most.count() / 1'000'000'000);
  time.tv_nsec = static_cast<long>(at_most.count() % 1'000'000'000);
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void futex_wake(uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// What is left of a policy's timeout. A gap between two questions in which the process cannot have
// run counts only up to kLongestGap.
class TimeLeft {
 public:
  explicit TimeLeft(const WaitPolicy& policy) : policy_(policy) {}

  Clock::duration operator()() {
    const auto gap = Clock::now() - asked_;
    asked_ += gap;
    waited_ += std::min<Clock::duration>(gap, 2 * policy_.idle + kLongestGap);
    return std::max<Clock::duration>(policy_.timeout - waited_, {});
  }

 private:
  const WaitPolicy& policy_;
  Clock::time_point asked_ = Clock::now();
  Clock::duration waited_{};
};

// The first part of every wait: spins for `policy.spin`, then yields. Returns whether `ready()` has
// returned true.
bool ready_soon(const std::function<bool()>& ready, const WaitPolicy& policy, TimeLeft& left) {
  const auto start = Clock::now();
  while (Clock::now() - start < std::min(policy.spin, policy.timeout)) {
    pause_briefly();
    if (ready()) return true;
    static_cast<void>(left());  // reads the clock, so that a long spin is not taken for a gap
  }
  for (int i = 0; i < kYields; ++i) {
    sched_yield();
    if (ready()) return true;
  }
  return false;
}

// The first sleep of a poll. A shorter one would end no sooner.
constexpr auto kFirstSleep = std::chrono::microseconds(50);

}  // namespace

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool poll_until(const std::function<bool()>& ready, const WaitPolicy& policy) {
  if (ready()) return true;
  TimeLeft left(policy);
  if (ready_soon(ready, policy, left)) return true;
  auto checked = Clock::now();
  std::chrono::nanoseconds sleep = kFirstSleep;
  while (true) {
    std::this_thread::sleep_for(std::min({sleep, policy.idle, left()}));
    if (ready()) return true;
    if (left().count() == 0) return false;
    sleep *= sleep < policy.idle ? 2 : 1;
    const auto now = Clock::now();
    if (now - checked < WaitPolicy{}.idle) continue;
    checked = now;
    if (auto* check = g_interrupt_check.load()) check();
  }
}

void set_interrupt_check(InterruptCheck check) { g_interrupt_check.store(check); }

void ring(Doorbell& bell) {
  // Sequentially consistent with the sleeper's own pair of accesses: either this thread sees the
  // sleeper, or the sleeper sees this ring before it sleeps.
  fetch_add_sequential_system(&bell.rings, 1u);
  if (load_sequential_system(&bell.sleepers) != 0) futex_wake(&bell.rings);
}

void pause_or_yield(int64_t empty_polls) {
  if (empty_polls < kPauses) return pause_briefly();
  sched_yield();
}

void sleep_until_rung(Doorbell& bell, const std::function<bool()>& ready,
                      std::chrono::nanoseconds at_most) {
  fetch_add_sequential_system(&bell.sleepers, 1u);
  const uint32_t seen = load_sequential_system(&bell.rings);
  if (!ready()) futex_wait(&bell.rings, seen, at_most);
  fetch_add_sequential_system(&bell.sleepers, ~0u);
}

WaitResult Waiter::until(const std::function<bool()>& ready, const std::function<bool()>& peer_gone,
                         const std::function<bool()>& deadlocked) const {
  if (ready()) return WaitResult::kReady;
  TimeLeft left(policy_);
  if (ready_soon(ready, policy_, left)) return WaitResult::kReady;
  auto checked = Clock::now();
  while (true) {
    if (deadlocked && deadlocked()) return WaitResult::kDeadlocked;
    sleep_until_rung(bell_, ready, std::min(policy_.idle, left()));
    if (ready()) return WaitResult::kReady;
    if (left().count() == 0) return WaitResult::kTimedOut;
    const auto now = Clock::now();
    if (now - checked < policy_.idle) continue;
    checked = now;
    if (auto* check = g_interrupt_check.load()) check();
    // The peer may have pushed the signal just before it ended, so poll once more.
    if (peer_gone() && !ready()) return WaitResult::kPeerGone;
  }
}

}  // namespace fanfold
