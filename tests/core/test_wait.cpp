// Bounded waits: wake-ups, timeouts, and the checks during a wait.
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/atomics.h"
#include "base/wait.h"
#include "check.hpp"
#include "ranks.hpp"

using namespace fanfold;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

// Far longer than any correct wait. A wait that misses its wake-up sleeps for this long.
constexpr auto kLong = 10s;

// A policy under which only a ring can end a sleep early.
constexpr WaitPolicy kOnlyRung{.timeout = kLong, .spin = 0ns, .idle = kLong};

bool never() { return false; }

struct Interrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Sets an interrupt check for the duration of a test.
struct InterruptChecked {
  explicit InterruptChecked(InterruptCheck check) { set_interrupt_check(check); }
  ~InterruptChecked() { set_interrupt_check(nullptr); }
};

std::atomic<int> interrupt_checks{0};

// A word that ranks pass around, each rank with its own doorbell. The payload is a plain variable
// that only the rank with the turn may touch, so a thread sanitizer finds a hand-off whose memory
// order is too weak.
struct Table {
  explicit Table(int32_t ranks) : bells(static_cast<size_t>(ranks)) {}

  std::vector<Doorbell> bells;
  uint64_t turn = 0;
  uint64_t payload = 0;
  std::atomic<int> missed{0};
};

// Passes the turn around `laps` times, or until a wait ends without the hand-off.
void pass_around(Table& table, int32_t rank, uint64_t laps) {
  const auto ranks = static_cast<uint64_t>(table.bells.size());
  Random random(static_cast<uint64_t>(rank));
  for (uint64_t lap = 0; lap < laps && table.missed == 0; ++lap) {
    const uint64_t mine = lap * ranks + static_cast<uint64_t>(rank);
    const auto began = Clock::now();
    const WaitResult result =
        Waiter(table.bells[static_cast<size_t>(rank)], kOnlyRung)
            .until([&] { return load_acquire_system(&table.turn) == mine; }, never);
    // A lost wake-up shows only as a sleep of a whole idle period.
    if (result != WaitResult::kReady || Clock::now() - began >= kLong) ++table.missed;
    table.payload += mine;
    // By now the next rank spins, is about to sleep, or sleeps.
    for (int32_t yields = random.between(0, 150); yields > 0; --yields) std::this_thread::yield();
    store_release_system(&table.turn, mine + 1);
    ring(table.bells[static_cast<size_t>((mine + 1) % ranks)]);
  }
}

}  // namespace

TEST(wait_is_ready_at_once) {
  Doorbell bell{};
  int asked = 0;
  const auto ready = [&] { return ++asked > 0; };
  CHECK_EQ(Waiter(bell, {0ns, 0ns}).until(ready, never), WaitResult::kReady);
  CHECK_EQ(asked, 1);
  CHECK_EQ(bell.sleepers, 0u);
}

TEST(wait_is_rung_awake) {
  auto bell = std::make_unique<Doorbell>();
  uint32_t flag = 0;
  std::thread ringer([&] {
    // Ring only after the other thread sleeps.
    const auto sleeps = [&] { return load_sequential_system(&bell->sleepers) != 0; };
    Doorbell own{};
    static_cast<void>(Waiter(own, {kLong, kLong}).until(sleeps, never));
    store_release_system(&flag, 1u);
    ring(*bell);
  });
  const auto began = Clock::now();
  const WaitResult result =
      Waiter(*bell, kOnlyRung).until([&] { return load_acquire_system(&flag) == 1; }, never);
  const bool woken = Clock::now() - began < kLong;
  ringer.join();
  CHECK_EQ(result, WaitResult::kReady);
  CHECK(woken);
  CHECK_EQ(bell->sleepers, 0u);
}

// The worst moment for a ring is between the last poll of the flag and the sleep. The predicate is
// that poll, so it rings the bell itself.
TEST(wait_notices_a_ring_right_before_its_sleep) {
  Doorbell bell{};
  uint32_t flag = 0;
  const auto look_then_push = [&] {
    if (flag == 1) return true;
    if (bell.sleepers != 0) {
      flag = 1;
      ring(bell);
    }
    return false;
  };
  const auto began = Clock::now();
  CHECK_EQ(Waiter(bell, kOnlyRung).until(look_then_push, never), WaitResult::kReady);
  CHECK(Clock::now() - began < kLong);
}

TEST(wake_ups_are_never_lost) {
  for (const int32_t ranks : {2, 3, 4}) {
    Table table(ranks);
    const uint64_t laps = 3000 / static_cast<uint64_t>(ranks * kRoundsShare);
    on_ranks(ranks, [&](int32_t rank) { pass_around(table, rank, laps); });
    const uint64_t turns = laps * static_cast<uint64_t>(ranks);
    CHECK_EQ(table.missed.load(), 0);
    CHECK_EQ(table.turn, turns);
    CHECK_EQ(table.payload, turns * (turns - 1) / 2);
    for (const Doorbell& bell : table.bells) CHECK_EQ(bell.sleepers, 0u);
  }
}

// Many threads ring one bell: other rings must neither end a wait nor hide the awaited one.
TEST(rings_of_others_do_not_end_a_wait) {
  constexpr int32_t kRingers = 3;
  const uint32_t rounds = 3000 / kRoundsShare;
  Doorbell bell{};
  std::vector<uint32_t> counts(kRingers);
  bool all_came = true;
  on_ranks(kRingers + 1, [&](int32_t rank) {
    if (rank < kRingers) {
      uint32_t& count = counts[static_cast<size_t>(rank)];
      for (uint32_t i = 1; i <= rounds; ++i) {
        store_release_system(&count, i);
        ring(bell);
      }
      return;
    }
    for (uint32_t round = 1; round <= rounds; ++round) {
      const auto all_at_round = [&] {
        for (const uint32_t& count : counts) {
          if (load_acquire_system(&count) < round) return false;
        }
        return true;
      };
      all_came &= Waiter(bell, kOnlyRung).until(all_at_round, never) == WaitResult::kReady;
    }
  });
  CHECK(all_came);
  CHECK_EQ(bell.sleepers, 0u);
}

TEST(wait_times_out_within_its_bound_and_not_before) {
  for (const auto timeout : {0ms, 1ms, 30ms, 120ms}) {
    // Neither a long spin nor a long sleep may extend the timeout.
    for (const WaitPolicy& policy :
         {WaitPolicy{timeout, 0ns}, WaitPolicy{timeout, kLong}, WaitPolicy{timeout, 0ns, kLong}}) {
      Doorbell bell{};
      const auto began = Clock::now();
      CHECK_EQ(Waiter(bell, policy).until(never, never), WaitResult::kTimedOut);
      const auto waited = Clock::now() - began;
      CHECK(waited >= timeout);
      CHECK(waited < kLong);
      CHECK_EQ(bell.sleepers, 0u);
    }
  }
}

TEST(wait_times_out_although_others_ring) {
  Doorbell bell{};
  std::atomic<bool> done{false};
  std::thread ringer([&] {
    while (!done) ring(bell);
  });
  const WaitResult result = Waiter(bell, {50ms, 0ns}).until(never, never);
  done = true;
  ringer.join();
  CHECK_EQ(result, WaitResult::kTimedOut);
}

TEST(wait_ends_early_when_the_peer_is_gone) {
  Doorbell bell{};
  int asked = 0;
  const auto peer_gone = [&] { return ++asked == 3; };
  CHECK_EQ(Waiter(bell, {kLong, 0ns, 1ms}).until(never, peer_gone), WaitResult::kPeerGone);
  CHECK_EQ(asked, 3);
}

TEST(a_push_before_the_end_of_the_peer_counts) {
  Doorbell bell{};
  bool pushed = false;
  // The peer pushes and ends: when its end is detected, its data has arrived.
  const auto peer_gone = [&] { return pushed = true; };
  const auto ready = [&] { return pushed; };
  CHECK_EQ(Waiter(bell, {kLong, 0ns, 1ms}).until(ready, peer_gone), WaitResult::kReady);
}

TEST(interrupt_check_may_throw_out_of_a_wait) {
  interrupt_checks = 0;
  const InterruptChecked guard([] {
    if (++interrupt_checks == 2) throw Interrupted("Ctrl-C");
  });
  Doorbell bell{};
  CHECK_THROWS(Waiter(bell, {kLong, 0ns, 1ms}).until(never, never), Interrupted);
  CHECK_EQ(interrupt_checks.load(), 2);
  CHECK_EQ(bell.sleepers, 0u);
}

TEST(short_waits_do_not_ask_for_interrupts) {
  interrupt_checks = 0;
  const InterruptChecked guard([] { ++interrupt_checks; });
  Doorbell bell{};
  CHECK_EQ(Waiter(bell, {5ms, 0ns, kLong}).until(never, never), WaitResult::kTimedOut);
  CHECK_EQ(interrupt_checks.load(), 0);
}

TEST(poll_until_returns_as_soon_as_its_condition_holds) {
  const WaitPolicy policy{.timeout = 60s, .spin = 1us, .idle = 1ms};
  CHECK(poll_until([] { return true; }, policy));
  std::atomic<bool> set = false;
  std::thread setter([&] {
    std::this_thread::sleep_for(20ms);
    set = true;
  });
  const bool held = poll_until([&] { return set.load(); }, policy);
  setter.join();
  CHECK(held);
}

// A sleep is a voluntary switch to another thread; a yield is not.
TEST(poll_until_spins_or_yields_before_it_sleeps) {
  const auto sleeps = [] {
    rusage used{};
    getrusage(RUSAGE_THREAD, &used);
    return used.ru_nvcsw;
  };
  constexpr int kPolls = 60;
  const auto before = sleeps();
  int polls = 0;
  CHECK(poll_until([&] { return ++polls == kPolls; }, {.timeout = 60s, .spin = 1us, .idle = 1ms}));
  CHECK(sleeps() - before < kPolls / 2);
}

TEST(poll_until_gives_up_after_its_timeout) {
  const auto start = std::chrono::steady_clock::now();
  CHECK(!poll_until([] { return false; }, {.timeout = 30ms, .spin = 1us, .idle = 1ms}));
  CHECK(std::chrono::steady_clock::now() - start >= 30ms);
}
