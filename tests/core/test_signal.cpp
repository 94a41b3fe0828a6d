// Signals: encoding, epochs that wrap, and memory order.
#include <array>
#include <cstdint>
#include <thread>

#include "base/atomics.h"
#include "base/wait.h"
#include "check.hpp"
#include "layout/signal.h"
#include "ranks.hpp"

using namespace fanfold;

TEST(signal_keeps_epoch_and_value) {
  for (const uint32_t epoch : {0u, 1u, 2u, 0x7fffffffu, 0x80000000u, 0xfffffffeu, 0xffffffffu}) {
    for (const int32_t value : {0, 1, kRefusedValue, -2, 1 << 24, INT32_MAX, INT32_MIN}) {
      const Signal back = Signal::decode(Signal{epoch, value}.encode());
      CHECK_EQ(back.epoch, epoch);
      CHECK_EQ(back.value, value);
    }
  }
  Random random(1);
  for (int i = 0; i < 10000; ++i) {
    const uint64_t word = random.next();
    CHECK_EQ(Signal::decode(word).encode(), word);
  }
}

TEST(fresh_memory_is_a_signal_of_epoch_zero) {
  CHECK_EQ(Signal::decode(0).epoch, 0u);
  CHECK_EQ(Signal::decode(0).value, 0);
}

TEST(reached_compares_by_distance) {
  constexpr uint32_t kHalf = 0x7fffffffu;
  for (const uint32_t at : {0u, 1u, 100u, 0x7ffffffeu, 0x80000000u, 0xfffffffdu, 0xffffffffu}) {
    CHECK(reached(at, at));
    CHECK(reached(at + 1, at));
    CHECK(reached(at + 2, at));
    CHECK(reached(at + kHalf, at));
    CHECK(!reached(at - 1, at));
    CHECK(!reached(at - 2, at));
    CHECK(!reached(at - kHalf, at));
  }
}

TEST(parities_alternate_through_the_wrap) {
  uint32_t epoch = 0xfffffff0u;
  for (int i = 0; i < 32; ++i, ++epoch) CHECK(parity_of(epoch) != parity_of(epoch + 1));
  CHECK_EQ(parity_of(0xffffffffu), 1);
  CHECK_EQ(parity_of(0u), 0);
}

// A small model of every mode's protocol: plain data in two halves, a signal for each written half
// and an acknowledgement for each read half. A thread sanitizer finds a memory order that is too
// weak.
TEST(signals_order_the_data_around_them) {
  struct Shared {
    Doorbell writer{};
    Doorbell reader{};
    uint64_t written = Signal{0xffffff00u, 0}.encode();
    uint64_t acknowledged = Signal{0xffffff00u, 0}.encode();
    std::array<std::array<uint32_t, 16>, kParities> data{};
  } shared;
  constexpr uint32_t kRounds = 20000 / kRoundsShare;
  const WaitPolicy policy{std::chrono::seconds(60), std::chrono::nanoseconds(0)};
  const auto wait_for = [&](Doorbell& bell, const uint64_t& word, uint32_t epoch) {
    const auto there = [&] {
      return reached(Signal::decode(load_acquire_system(&word)).epoch, epoch);
    };
    return Waiter(bell, policy).until(there, [] { return false; }) == WaitResult::kReady;
  };

  bool writer_waited_well = true;
  std::thread writer([&] {
    for (uint32_t epoch = 0xffffff01u; epoch != 0xffffff01u + kRounds; ++epoch) {
      writer_waited_well &= wait_for(shared.writer, shared.acknowledged, epoch - kParities);
      shared.data[static_cast<size_t>(parity_of(epoch))].fill(epoch);
      store_release_system(&shared.written, Signal{epoch, 0}.encode());
      ring(shared.reader);
    }
  });
  bool reader_waited_well = true;
  uint32_t wrong = 0;
  for (uint32_t epoch = 0xffffff01u; epoch != 0xffffff01u + kRounds; ++epoch) {
    reader_waited_well &= wait_for(shared.reader, shared.written, epoch);
    for (const uint32_t word : shared.data[static_cast<size_t>(parity_of(epoch))]) {
      wrong += word != epoch ? 1 : 0;
    }
    store_release_system(&shared.acknowledged, Signal{epoch, 0}.encode());
    ring(shared.writer);
  }
  writer.join();
  CHECK(writer_waited_well);
  CHECK(reader_waited_well);
  CHECK_EQ(wrong, 0u);
}
