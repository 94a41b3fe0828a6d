// Commands: every field keeps its value, and a field that does not fit is refused.
#include <cstdint>
#include <initializer_list>
#include <string>

#include "base/error.h"
#include "check.hpp"
#include "layout/command.h"
#include "ranks.hpp"
#include "ring/command.h"

using namespace fanfold;

namespace {

constexpr CommandFields kSmallWrite = {.kind = CommandKind::kWrite,
                                       .peer = 3,
                                       .counter = 1,
                                       .bytes = 7168,
                                       .source = 16,
                                       .target = 32};

// A value from 0 to `bound`, often near one of the two.
int64_t any_of(Random& random, int64_t bound) {
  const auto inside = static_cast<int64_t>(random.next() % (static_cast<uint64_t>(bound) + 1));
  if (random.one_in(4)) return bound;
  return random.one_in(4) ? inside % 2 : inside;
}

CommandFields any_fields(Random& random) {
  CommandFields fields;
  fields.kind = static_cast<CommandKind>(random.between(0, 5));
  const auto any = [&](CommandField field) {
    return any_of(random, command_bound(fields.kind, field));
  };
  fields.peer = any(CommandField::kPeer);
  fields.counter = any(CommandField::kCounter);
  fields.bytes = any(CommandField::kBytes);
  fields.amount = any(CommandField::kAmount);
  fields.source = any(CommandField::kSource) / kCommandUnit * kCommandUnit;
  const int64_t unit = command_unit(fields.kind);
  fields.target = any(CommandField::kTarget) / unit * unit;
  if (fields.kind == CommandKind::kStore) fields.word = random.next();
  return fields;
}

// The error's text if `fields` make no command; empty if they do.
std::string refusal(const CommandFields& fields) {
  try {
    make_command(fields);
    return "";
  } catch (const BadArgument& error) {
    return error.argument + " " + error.value + ": " + error.bound;
  }
}

using Member = int64_t CommandFields::*;

std::string refusal(CommandFields fields, Member member, int64_t value) {
  fields.*member = value;
  return refusal(fields);
}

}  // namespace

TEST(command_fields_survive_the_round_trip) {
  Random random(1);
  for (int round = 0; round < 20000; ++round) {
    const CommandFields fields = any_fields(random);
    const Command command = make_command(fields);
    CHECK(command.has_lap(0));
    for (const uint64_t lap : {uint64_t{0}, uint64_t{1}}) {
      CHECK(command.with_lap(lap).has_lap(lap));
      CHECK(!command.with_lap(lap).has_lap(1 - lap));
      CHECK(command.with_lap(lap).fields() == fields);
      CHECK(command.with_lap(lap).with_lap(0).words[0] == command.words[0]);
      CHECK(command.with_lap(lap).with_lap(0).words[1] == command.words[1]);
    }
  }
}

// Bit by bit as docs/across_hosts.md has it, without the header's own constants.
TEST(command_bits_lie_where_the_table_says) {
  const Command write = make_command({.kind = CommandKind::kWrite,
                                      .peer = 0xabc,
                                      .counter = 0xd,
                                      .bytes = 0x12345678,
                                      .source = int64_t{0x7eadbeef} * 16,
                                      .target = int64_t{0xcafef00d} * 16});
  CHECK_EQ(write.words[0], 0x12345678000dabc2u);
  CHECK_EQ(write.words[1], 0xcafef00d00000000u | uint64_t{0x7eadbeef} << 1);
  const Command signal =
      make_command({.kind = CommandKind::kSignal, .peer = 5, .counter = 9, .amount = 0xffffffff});
  CHECK_EQ(signal.words[0], 0xffffffff00090054u);
  CHECK_EQ(signal.words[1], 0u);
  CHECK_EQ(make_command({.kind = CommandKind::kFence}).words[0], 6u);
  CHECK_EQ(make_command({.kind = CommandKind::kBarrier}).words[0], 8u);
  CHECK_EQ(make_command({}).words[0], 0u);
  const Command torn{{write.words[0] | 1u, write.words[1]}};
  CHECK(!torn.has_lap(0));
  CHECK(!torn.has_lap(1));
}

TEST(command_fields_that_do_not_fit_are_refused_by_name) {
  const CommandFields write = kSmallWrite;
  CHECK_EQ(refusal(write), "");
  CHECK_EQ(refusal(write, &CommandFields::peer, 4096), "peer 4096: 0 to 4095");
  CHECK_EQ(refusal(write, &CommandFields::peer, -1), "peer -1: 0 to 4095");
  CHECK_EQ(refusal(write, &CommandFields::counter, 16), "counter 16: 0 to 15");
  CHECK_EQ(refusal(write, &CommandFields::bytes, int64_t{1} << 32),
           "bytes 4294967296: 0 to 4294967295");
  CHECK_EQ(refusal(write, &CommandFields::source, int64_t{32} << 30),
           "source 34359738368: a multiple of 16 from 0 to 34359738352");
  CHECK_EQ(refusal(write, &CommandFields::source, 24),
           "source 24: a multiple of 16 from 0 to 34359738352");
  CHECK_EQ(refusal(write, &CommandFields::target, int64_t{64} << 30),
           "target 68719476736: a multiple of 16 from 0 to 68719476720");
  CHECK_EQ(refusal(write, &CommandFields::target, 8),
           "target 8: a multiple of 16 from 0 to 68719476720");
  const CommandFields signal = {.kind = CommandKind::kSignal, .peer = 1, .amount = 1};
  CHECK_EQ(refusal(signal), "");
  CHECK_EQ(refusal(signal, &CommandFields::amount, int64_t{1} << 32),
           "amount 4294967296: 0 to 4294967295");
  const CommandFields store = {.kind = CommandKind::kStore, .word = ~uint64_t{0}};
  CHECK_EQ(refusal(store), "");
  CHECK_EQ(refusal(store, &CommandFields::target, 12),
           "target 12: a multiple of 8 from 0 to 1125899906842616");
  CHECK_EQ(refusal({.kind = static_cast<CommandKind>(6)}), "kind 6: a CommandKind, 0 to 5");
}

TEST(command_fields_that_its_kind_lacks_are_refused) {
  const CommandFields fence = {.kind = CommandKind::kFence};
  CHECK_EQ(refusal(fence), "");
  for (const Member member :
       {&CommandFields::peer, &CommandFields::counter, &CommandFields::bytes,
        &CommandFields::amount, &CommandFields::source, &CommandFields::target}) {
    CHECK(refusal(fence, member, 16).ends_with("0 in a fence"));
  }
  CHECK_EQ(refusal(kSmallWrite, &CommandFields::amount, 1), "amount 1: 0 in a write");
  const CommandFields signal = {.kind = CommandKind::kSignal, .amount = 1};
  CHECK_EQ(refusal(signal, &CommandFields::bytes, 1), "bytes 1: 0 in a signal");
  CHECK_EQ(refusal(signal, &CommandFields::source, 16), "source 16: 0 in a signal");
  CHECK_EQ(refusal({.kind = CommandKind::kSignal, .amount = 1, .word = 9}),
           "word 9: 0 in a signal");
  CHECK_EQ(refusal({.kind = CommandKind::kStore, .bytes = 8}), "bytes 8: 0 in a store");
}

// A reader of shared memory checks what it has decoded with the same function.
TEST(command_bits_that_no_command_has_are_found) {
  const Command counter{{make_command(kSmallWrite).words[0] | uint64_t{0x8000} << 16, 0}};
  CHECK_EQ(counter.fields().counter, 0x8001);
  CHECK(misfit(counter.fields()) == CommandField::kCounter);
  CHECK(misfit(Command{{7u << 1, 0}}.fields()) == CommandField::kKind);
  CHECK(misfit(Command{{3u << 1, 2}}.fields()) == CommandField::kSource);
  CHECK(misfit(make_command(kSmallWrite).fields()) == CommandField::kFits);
}
