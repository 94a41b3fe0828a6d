// The two rings of a proxy thread: whose commands come first, and what is freed when.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "base/wait.h"
#include "check.hpp"
#include "proxy/command_rings.h"
#include "proxy_world.hpp"
#include "ring/command.h"

using namespace fanfold;
using namespace std::chrono_literals;
using proxy::CommandRings;

namespace {

constexpr std::chrono::nanoseconds kPatience = 30s;

Command signal_of(int64_t amount) {
  return make_command({.kind = CommandKind::kSignal, .amount = amount});
}

int64_t pop_amount(CommandRings& rings) {
  Command command{};
  CHECK(rings.pop(command));
  return command.fields().amount;
}

uint64_t consumed_of(const Ring& ring) { return Producer(ring).consumed(); }

}  // namespace

TEST(command_rings_pop_what_kernels_pushed_before_what_the_host_pushed) {
  CommandRings rings(4, 4);
  Producer host(rings.of_host());
  Producer kernels(*rings.of_kernels());
  CHECK(host.try_push(signal_of(3)).has_value());
  CHECK(kernels.try_push(signal_of(1)).has_value());
  CHECK(kernels.try_push(signal_of(2)).has_value());
  for (int64_t amount = 1; amount <= 3; ++amount) CHECK_EQ(pop_amount(rings), amount);
  Command command{};
  CHECK(!rings.pop(command));
}

TEST(command_rings_free_all_but_a_command_that_is_held) {
  CommandRings rings(4, 4);
  Producer host(rings.of_host());
  Producer kernels(*rings.of_kernels());
  CHECK(kernels.try_push(signal_of(1)).has_value());
  CHECK_EQ(pop_amount(rings), 1);
  rings.publish(true);
  CHECK_EQ(consumed_of(*rings.of_kernels()), 0u);
  rings.publish(false);
  CHECK_EQ(consumed_of(*rings.of_kernels()), 1u);
  CHECK(host.try_push(signal_of(2)).has_value());
  CHECK(kernels.try_push(signal_of(3)).has_value());
  CHECK_EQ(pop_amount(rings), 3);
  CHECK_EQ(pop_amount(rings), 2);
  rings.publish(true);
  CHECK_EQ(consumed_of(rings.of_host()), 0u);
  CHECK_EQ(consumed_of(*rings.of_kernels()), 2u);
  rings.publish(false);
  CHECK_EQ(consumed_of(rings.of_host()), 1u);
}

TEST(command_rings_without_kernels_are_one) {
  CommandRings rings(4, 0);
  CHECK(rings.of_kernels() == nullptr);
  CHECK(Producer(rings.of_host()).try_push(signal_of(1)).has_value());
  CHECK_EQ(pop_amount(rings), 1);
  rings.publish(false);
  CHECK_EQ(consumed_of(rings.of_host()), 1u);
  CHECK_EQ(rings.abandoned(), 0u);
}

// A thread pushes a number for the kernels, then the same for the host. Whenever it does so, the
// first of the two is popped first. Without the second look a run in three or so fails.
TEST(command_rings_keep_the_order_while_both_are_pushed) {
  constexpr int64_t kNumbers = 50000;
  CommandRings rings(8, 8);
  std::thread pushing([&] {
    Producer host(rings.of_host());
    Producer kernels(*rings.of_kernels());
    for (int64_t number = 1; number <= kNumbers; ++number) {
      kernels.push(make_command({.kind = CommandKind::kSignal, .counter = 1, .amount = number}),
                   kPatience);
      host.push(signal_of(number), kPatience);
    }
  });
  int64_t of_kernels = 0;
  int64_t of_host = 0;
  int64_t early = 0;
  const auto pop_some = [&] {
    for (Command command{}; rings.pop(command); rings.publish(false)) {
      const CommandFields fields = command.fields();
      (fields.counter == 1 ? of_kernels : of_host) = fields.amount;
      early += of_host > of_kernels ? 1 : 0;
    }
    return of_host == kNumbers;
  };
  const bool ended = poll_until(pop_some, {.timeout = kPatience, .spin = 1ms, .idle = 20us});
  pushing.join();
  CHECK(ended);
  CHECK_EQ(early, 0);
}

// The same of a whole proxy: a fence of the host waits for rows that kernels sent before.
TEST(proxy_fence_waits_for_what_kernels_have_pushed) {
  proxy::ProxyOptions options;
  options.ranks = 2;
  options.threads = 1;
  options.kernel_ring_slots = 8;
  ProxyWorld world(options, quiet_network(), 4096);
  Producer kernels(*world.proxy(0).thread(0).kernel_ring());
  for (int64_t row = 0; row < 3; ++row) {
    world[0].memory[row * 16] = static_cast<std::byte>(row + 1);
    const CommandFields write{.kind = CommandKind::kWrite,
                              .peer = 1,
                              .bytes = 16,
                              .source = row * 16,
                              .target = 1024 + row * 32};
    CHECK(kernels.try_push(make_command(write)).has_value());
  }
  const proxy::Tickets fence = world.proxy(0).push_all(CommandKind::kFence);
  for (int step = 0; step < 1000 && !world.proxy(0).passed(fence); ++step) world.step_all();
  CHECK(world.proxy(0).passed(fence));
  for (int64_t row = 0; row < 3; ++row) {
    CHECK(world[1].memory[1024 + row * 32] == static_cast<std::byte>(row + 1));
  }
}

// A place that a kernel has taken and never filled would stop the ring for ever.
TEST(proxy_fails_for_commands_that_kernels_have_abandoned) {
  proxy::ProxyOptions options;
  options.ranks = 2;
  options.threads = 1;
  options.kernel_ring_slots = 8;
  ProxyWorld world(options, quiet_network(), 4096);
  world.proxy(0).thread(0).kernel_ring()->view().faults->abandoned = 2;
  for (int second = 0; second < 10; ++second) {
    world.proxy(0).thread(0).step(proxy::ProxyThread::Time{std::chrono::seconds(second)});
  }
  CHECK(world.proxy(0).failure() != nullptr);
  CHECK(world.proxy(0).failure()->text.find("gave up 2 commands") != std::string::npos);
  CHECK_EQ(world.proxy(0).thread(0).kernel_ring()->view().losses()->peers[0], uint64_t{1} << 1);
}

// What came from it before has been stored by then.
TEST(proxy_tells_kernels_of_a_peer_that_is_lost) {
  proxy::ProxyOptions options;
  options.ranks = 70;
  options.threads = 1;
  options.kernel_ring_slots = 8;
  options.give_up_peers = true;
  ProxyWorld world(options, quiet_network(), 70 * 64);
  const RingView ring = world.proxy(0).thread(0).kernel_ring()->view();
  world.proxy(0).push({.kind = CommandKind::kWrite, .peer = 66, .counter = 0, .bytes = 64});
  world.step(0, 0);
  CHECK_EQ(ring.losses()->peers[1], 0u);
  world.network().kill(66);
  for (int step = 0; step < 400; ++step) world.step(0, 0);
  CHECK(world.proxy(0).lost(66));
  CHECK_EQ(ring.losses()->peers[0], 0u);
  CHECK_EQ(ring.losses()->peers[1], uint64_t{1} << (66 - 64));
}
