#include "base/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <ctime>

#include "base/atomics.h"

namespace fanfold {
namespace {

using Clock = std::chrono::steady_clock;

// A yield costs about a microsecond when nobody else wants the core.
constexpr int kYields = 64;

// A longer gap between two looks, beyond the sleep, is time in which this process did not run (it
// was stopped, or the machine slept): its peers stood still too, or shall not pay for it.
constexpr auto kLongestGap = std::chrono::seconds(1);

std::atomic<InterruptCheck> g_interrupt_check{nullptr};

// Shared between processes, so not FUTEX_PRIVATE_FLAG.
void futex_wait(uint32_t* word, uint32_t seen, std::chrono::nanoseconds at_most) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(at_most.count() / 1'000'000'000);
  time.tv_nsec = static_cast<long>(at_most.count() % 1'000'000'000);
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void futex_wake(uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void set_interrupt_check(InterruptCheck check) { g_interrupt_check.store(check); }

void ring(Doorbell& bell) {
  // Sequentially consistent with the sleeper's own pair of accesses: either we see that it sleeps,
  // or it sees this ring before it goes to sleep.
  fetch_add_sequential_system(&bell.rings, 1u);
  if (load_sequential_system(&bell.sleepers) != 0) futex_wake(&bell.rings);
}

void Waiter::sleep_until_rung(const std::function<bool()>& ready,
                              std::chrono::nanoseconds at_most) const {
  fetch_add_sequential_system(&bell_.sleepers, 1u);
  const uint32_t seen = load_sequential_system(&bell_.rings);
  if (!ready()) futex_wait(&bell_.rings, seen, at_most);
  fetch_add_sequential_system(&bell_.sleepers, ~0u);
}

WaitResult Waiter::until(const std::function<bool()>& ready, const std::function<bool()>& hopeless,
                         const std::function<bool()>& deadlocked) const {
  if (ready()) return WaitResult::kReady;
  const auto start = Clock::now();
  auto looked = start;
  Clock::duration waited{};
  const auto left = [&] {
    const auto gap = Clock::now() - looked;
    looked += gap;
    waited += std::min<Clock::duration>(gap, 2 * policy_.idle + kLongestGap);
    return std::max<Clock::duration>(policy_.timeout - waited, {});
  };
  while (Clock::now() - start < std::min(policy_.spin, policy_.timeout)) {
    pause_briefly();
    if (ready()) return WaitResult::kReady;
    static_cast<void>(left());  // looks at the clock, so that a long spin is no gap
  }
  for (int i = 0; i < kYields; ++i) {
    sched_yield();
    if (ready()) return WaitResult::kReady;
  }
  auto checked = Clock::now();
  while (true) {
    if (deadlocked && deadlocked()) return WaitResult::kDeadlocked;
    sleep_until_rung(ready, std::min(policy_.idle, left()));
    if (ready()) return WaitResult::kReady;
    if (left().count() == 0) return WaitResult::kTimedOut;
    const auto now = Clock::now();
    if (now - checked < policy_.idle) continue;
    checked = now;
    if (auto* check = g_interrupt_check.load()) check();
    // What the peer did before it ended counts, so look once more after it is known to be gone.
    if (hopeless() && !ready()) return WaitResult::kAbandoned;
  }
}

}  // namespace fanfold
