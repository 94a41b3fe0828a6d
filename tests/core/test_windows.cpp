// The windows of a channel and the split of commands into messages, case by case. The model in
// test_windows_model.cpp tries every order.
#include <cstdint>
#include <optional>
#include <vector>

#include "base/error.h"
#include "check.hpp"
#include "proxy/span.h"
#include "proxy/window.h"
#include "ranks.hpp"

using namespace fanfold;
using namespace fanfold::proxy;

namespace {

constexpr int32_t kBits = 18;  // of an acknowledgement between 4096 ranks
constexpr uint32_t kMask = (1u << kBits) - 1;
// Just before each of the numbers on the wire wraps, and somewhere else.
const std::vector<uint64_t> kFirst = {0, 250, (1u << kBits) - 3, 0xfffffffeu, ~uint64_t{0} - 1, 77};

Immediate message(ImmediateKind kind, uint64_t sequence, int32_t counter = 0, uint32_t amount = 1) {
  return {kind, 0, counter, static_cast<uint32_t>(sequence & 255), amount};
}
Immediate data(uint64_t sequence) { return message(ImmediateKind::kData, sequence); }

uint32_t on_the_wire(uint64_t accepted) { return static_cast<uint32_t>(accepted) & kMask; }

}  // namespace

TEST(send_window_frees_only_what_is_acknowledged_and_completed) {
  for (const uint64_t first : kFirst) {
    SendWindow window({.messages = 3, .bytes = 100}, kBits, first);
    for (int i = 0; i < 3; ++i) window.post(10, 0);
    CHECK(!window.admits(0));
    CHECK(window.acknowledge(on_the_wire(first + 3)));
    CHECK_EQ(window.messages(), 3);
    CHECK(window.complete(first + 1));
    CHECK_EQ(window.messages(), 3);  // the oldest may still land again
    CHECK(window.complete(first));
    CHECK_EQ(window.messages(), 1);
    CHECK_EQ(window.bytes(), 10);
    CHECK(window.complete(first + 2));
    CHECK(window.idle());
    CHECK_EQ(window.bytes(), 0);

    window.post(5, 0);
    CHECK(window.complete(first + 3));
    CHECK_EQ(window.messages(), 1);  // completion alone grants nothing
    CHECK(window.acknowledge(on_the_wire(first + 4)));
    CHECK(window.idle());
  }
}

TEST(send_window_counts_bytes) {
  SendWindow window({.messages = 128, .bytes = 100}, kBits);
  CHECK(window.admits(100));
  CHECK(!window.admits(101));
  window.post(60, 0);
  CHECK(window.admits(40));
  CHECK(!window.admits(41));
  CHECK(!window.admits(INT64_MAX));
  CHECK(!window.admits(-1));
  CHECK_THROWS(window.post(41, 0), Misuse);
  window.post(40, 0);
  CHECK(window.admits(0));
  window.post(0, 0);
  CHECK_EQ(window.messages(), 3);
  CHECK_EQ(window.bytes(), 100);
}

// A copy of a message may land until it is no longer in flight.
TEST(send_window_knows_where_messages_in_flight_write) {
  SendWindow window({.messages = 4, .bytes = 1000}, kBits, UINT64_MAX);
  window.post(100, 1000);
  window.post(50, 2000);
  for (const int64_t target : {901, 1000, 1099, 1951, 2049}) CHECK(window.writes_to(target, 100));
  for (const int64_t target : {900, 1100, 1900, 2050}) CHECK(!window.writes_to(target, 100));
  CHECK(!window.writes_to(1050, 0));
  CHECK(window.acknowledge(on_the_wire(0)));
  CHECK(window.writes_to(1000, 1));
  CHECK(window.complete(UINT64_MAX));
  CHECK(!window.writes_to(1000, 1));
  CHECK(window.writes_to(2000, 1));
}

TEST(send_window_ignores_repeated_and_overtaken_acknowledgements) {
  for (const uint64_t first : kFirst) {
    SendWindow window({.messages = 128, .bytes = 1000}, kBits, first);
    for (int i = 0; i < 10; ++i) window.post(1, 0);
    CHECK(window.acknowledge(on_the_wire(first + 4)));
    CHECK_EQ(window.unacknowledged(), 6);
    CHECK(!window.acknowledge(on_the_wire(first + 4)));
    CHECK(!window.acknowledge(on_the_wire(first + 3)));
    CHECK(!window.acknowledge(on_the_wire(first)));
    CHECK(!window.acknowledge(on_the_wire(first + 11)));  // was never sent
    CHECK_EQ(window.unacknowledged(), 6);
    CHECK(window.acknowledge(on_the_wire(first + 10)));
    CHECK_EQ(window.unacknowledged(), 0);
  }
}

TEST(send_window_refuses_completions_of_nothing) {
  for (const uint64_t first : kFirst) {
    SendWindow window({.messages = 4, .bytes = 100}, kBits, first);
    CHECK(!window.complete(first));
    window.post(1, 0);
    CHECK(!window.complete(first + 1));
    CHECK(!window.complete(first - 1));
    CHECK(window.complete(first));
    CHECK(!window.complete(first));
    CHECK(window.acknowledge(on_the_wire(first + 1)));
    CHECK(!window.complete(first));
  }
}

TEST(receive_window_accepts_each_message_once) {
  for (const uint64_t first : kFirst) {
    ReceiveWindow window({.messages = 4, .bytes = 100}, first);
    CHECK_EQ(window.accept(data(first + 2)), Acceptance::kNew);
    CHECK_EQ(window.accept(data(first + 2)), Acceptance::kDuplicate);
    CHECK(!window.next_due());
    CHECK_EQ(window.news(), 0);  // the first two are missing
    CHECK_EQ(window.accept(data(first)), Acceptance::kNew);
    CHECK(!window.next_due());
    CHECK_EQ(window.news(), 1);
    CHECK_EQ(window.accept(data(first + 1)), Acceptance::kNew);
    CHECK(!window.next_due());
    CHECK_EQ(window.news(), 3);
    for (uint64_t i = 0; i < 3; ++i) {
      CHECK_EQ(window.accept(data(first + i)), Acceptance::kDuplicate);
    }
    CHECK_EQ(window.accept(data(first + 7)), Acceptance::kInvalid);  // four are granted
    CHECK_EQ(window.accept(data(first + 6)), Acceptance::kNew);
    CHECK_EQ(window.accept(data(first - 2)), Acceptance::kInvalid);
    CHECK_EQ(window.accept(data(first - 1)), Acceptance::kDuplicate);
  }
}

TEST(receive_window_executes_stores_in_order) {
  for (const uint64_t first : kFirst) {
    ReceiveWindow window({.messages = 128, .bytes = 100}, first);
    CHECK_EQ(window.accept(message(ImmediateKind::kStore, first + 1, 0, 1)), Acceptance::kNew);
    CHECK_EQ(window.accept(message(ImmediateKind::kSignal, first + 2, 3, 7)), Acceptance::kNew);
    CHECK(!window.next_due());
    CHECK_EQ(window.accept(data(first)), Acceptance::kNew);
    CHECK(window.next_due() == Due(true, first + 1, {}));
    CHECK(window.next_due() == Due(false, first + 2, {3, 7}));
    CHECK(!window.next_due());
  }
}

TEST(receive_window_counts_signals_in_order) {
  for (const uint64_t first : kFirst) {
    ReceiveWindow window({.messages = 128, .bytes = 100}, first);
    CHECK_EQ(window.accept(message(ImmediateKind::kSignal, first + 1, 3, 7)), Acceptance::kNew);
    CHECK_EQ(window.accept(message(ImmediateKind::kSignal, first + 2, 4, 8)), Acceptance::kNew);
    CHECK_EQ(window.accept(message(ImmediateKind::kSignal, first + 4, 5, 9)), Acceptance::kNew);
    CHECK(!window.next_due());
    CHECK_EQ(window.accept(data(first)), Acceptance::kNew);
    CHECK(window.next_due().value_or(Due{}).addition == Addition(3, 7));
    CHECK(window.next_due().value_or(Due{}).addition == Addition(4, 8));
    CHECK(!window.next_due());
    CHECK_EQ(window.news(), 3);
    CHECK_EQ(window.accept(data(first + 3)), Acceptance::kNew);
    CHECK(window.next_due().value_or(Due{}).addition == Addition(5, 9));
    CHECK(!window.next_due());
    CHECK_EQ(window.accepted_in_order(), first + 5);
  }
}

TEST(receive_window_acknowledges_a_quarter_of_a_window_or_when_quiet) {
  ReceiveWindow window({.messages = 128, .bytes = 100});
  const auto take = [&](uint64_t sequence) {
    CHECK_EQ(window.accept(data(sequence)), Acceptance::kNew);
    CHECK(!window.next_due());
  };
  CHECK(!window.should_acknowledge(true));  // nothing is new
  for (uint64_t i = 0; i < 31; ++i) take(i);
  CHECK(!window.should_acknowledge(false));
  CHECK(window.should_acknowledge(true));
  take(31);
  CHECK(window.should_acknowledge(false));
  window.acknowledgement_sent();
  CHECK_EQ(window.news(), 0);
  for (uint64_t i = 32; i < 100; ++i) take(i);
  CHECK(!window.should_acknowledge(true));  // one is on its way
  CHECK(window.acknowledgement_completed());
  CHECK(!window.acknowledgement_completed());
  CHECK(window.should_acknowledge(false));

  ReceiveWindow least({.messages = 1, .bytes = 1});
  CHECK_EQ(least.accept(data(0)), Acceptance::kNew);
  CHECK(!least.next_due());
  CHECK(least.should_acknowledge(false));
}

TEST(windows_check_their_bounds) {
  CHECK_THROWS(SendWindow({.messages = 0, .bytes = 1}, kBits), BadArgument);
  CHECK_THROWS(SendWindow({.messages = 129, .bytes = 1}, kBits), BadArgument);
  CHECK_THROWS(SendWindow({.messages = 1, .bytes = 0}, kBits), BadArgument);
  CHECK_THROWS(SendWindow({.messages = 1, .bytes = 1}, 8), BadArgument);
  CHECK_THROWS(SendWindow({.messages = 1, .bytes = 1}, 33), BadArgument);
  CHECK_THROWS(ReceiveWindow({.messages = 129, .bytes = 1}), BadArgument);
  CHECK_THROWS(check_limits({.part_bytes = 0, .message_bytes = 1, .message_parts = 1, .rails = 1}),
               BadArgument);
  CHECK_THROWS(check_limits({.part_bytes = 2, .message_bytes = 1, .message_parts = 1, .rails = 1}),
               BadArgument);
  CHECK_THROWS(check_limits({.part_bytes = 1, .message_bytes = 1, .message_parts = 0, .rails = 1}),
               BadArgument);
  CHECK_THROWS(check_limits({.part_bytes = 1, .message_bytes = 1, .message_parts = 1, .rails = 0}),
               BadArgument);
}

namespace {

constexpr SpanLimits kLimits{
    .part_bytes = 64, .message_bytes = 256, .message_parts = 5, .rails = 2};

Span span(int64_t source, int64_t target, int64_t bytes, int32_t counter = 1) {
  return {counter, source, target, bytes, parts_of(bytes, kLimits.part_bytes)};
}

std::vector<Span> messages_of(Span rest) {
  const int64_t each = parts_each(rest, kLimits);
  std::vector<Span> messages;
  while (rest.parts > 0 && messages.size() < 1000) {
    messages.push_back(split(rest, each, kLimits.part_bytes));
  }
  CHECK_EQ(rest.parts, 0);
  CHECK_EQ(rest.bytes, 0);
  return messages;
}

}  // namespace

TEST(contiguous_commands_become_one_message) {
  Span run = span(0, 1000, 16);
  CHECK(coalesce(run, span(16, 1016, 80), kLimits));
  CHECK(run == Span(1, 0, 1000, 96, 3));
  CHECK(!coalesce(run, span(96, 1112, 16), kLimits));     // a gap at the target
  CHECK(!coalesce(run, span(112, 1096, 16), kLimits));    // a gap at the source
  CHECK(!coalesce(run, span(96, 1096, 16, 2), kLimits));  // another counter
  CHECK(!coalesce(run, span(96, 1096, 161), kLimits));    // 257 bytes
  CHECK(!coalesce(run, span(96, 1096, 160), kLimits));    // 6 parts
  CHECK(coalesce(run, span(96, 1096, 128), kLimits));
  CHECK(run == Span(1, 0, 1000, 224, 5));
  CHECK(!coalesce(run, span(224, 1224, 0), kLimits));  // nothing counts as a part, too
  CHECK(messages_of(run) == std::vector<Span>{run});
}

TEST(large_commands_are_split_into_whole_parts_over_the_rails) {
  CHECK(messages_of(span(0, 0, 0)) == std::vector<Span>{span(0, 0, 0)});
  CHECK(messages_of(span(0, 0, 64)) == std::vector<Span>{span(0, 0, 64)});
  const std::vector<Span> two{span(0, 512, 128), span(128, 640, 65)};
  CHECK(messages_of(span(0, 512, 193)) == two);
  // As large as a message may be, where a message for each rail would be too large.
  const std::vector<Span> many = messages_of(span(0, 0, 2000));
  CHECK_EQ(many.size(), 8u);
  CHECK_EQ(many.front().bytes, 256);
  CHECK_EQ(many.back().bytes, 2000 - 7 * 256);
}

// Whatever is coalesced and split, the messages cover the bytes, and the counter grows by the sum
// of the commands' parts.
TEST(messages_keep_the_bytes_and_the_parts_of_their_commands) {
  Random random(3);
  for (int round = 0; round < 20'000 / kRoundsShare; ++round) {
    Span run = span(0, 4096, random.between(0, 100));
    int64_t bytes = run.bytes;
    int64_t parts = run.parts;
    if (random.one_in(4)) {
      run = span(0, 4096, random.between(0, 5000));
      bytes = run.bytes;
      parts = run.parts;
    }
    for (int i = random.between(0, 4); i > 0; --i) {
      const Span next = span(bytes, 4096 + bytes, random.between(0, 100));
      if (!coalesce(run, next, kLimits)) continue;
      bytes += next.bytes;
      parts += next.parts;
    }
    int64_t offset = 0;
    for (const Span& message : messages_of(run)) {
      CHECK_EQ(message.source_offset, offset);
      CHECK_EQ(message.target_offset, 4096 + offset);
      CHECK(message.parts >= 1 && message.parts <= kLimits.message_parts);
      CHECK(message.bytes <= kLimits.message_bytes);
      offset += message.bytes;
      parts -= message.parts;
    }
    CHECK_EQ(offset, bytes);
    CHECK_EQ(parts, 0);
  }
}
