// A command: 128 bits that tell a proxy what to send. Whoever produces tokens makes commands and
// pushes them into a ring (layout/ring.h).
//
//   word  bits   field
//   0     0      lap, set by the ring
//   0     1-3    kind
//   0     4-15   peer
//   0     16-31  counter at the peer
//   0     32-63  write: bytes; signal: amount
//   1     0      lap, the same bit again
//   1     1-31   write: source offset / 16
//   1     32-63  write: target offset / 16
//
// A store has a whole word to carry, so it has other fields behind the peer:
//
//   0     16     bit 63 of the word
//   0     17-63  target offset / 8
//   1     1-63   bits 0 to 62 of the word
#pragma once

#include "layout/types.h"

namespace fanfold {

enum class CommandKind : uint32_t {
  kNone = 0,     // does nothing
  kWrite = 1,    // copies bytes to the peer and adds the parts to its counter
  kSignal = 2,   // adds an amount to a counter of the peer
  kFence = 3,    // done once the peers have acknowledged everything that was pushed before
  kBarrier = 4,  // a fence, then a meeting with all peers
  kStore = 5,    // stores a word at the peer after everything that was pushed for it before
};

// Whether a command of this kind is for one peer.
FANFOLD_HD constexpr bool has_peer(CommandKind kind) {
  return kind == CommandKind::kWrite || kind == CommandKind::kSignal || kind == CommandKind::kStore;
}

// Offsets count units of so many bytes, the alignment of rows.
inline constexpr int64_t kCommandUnit = kRowAlignment;

// Offsets of writes from here on count from the start of memory for rows alone, if there is any.
inline constexpr int64_t kRowsApart = int64_t{1} << 34;

inline constexpr int64_t kMaxCommandPeer = (int64_t{1} << 12) - 1;
inline constexpr int64_t kMaxCommandCounter = 15;  // an immediate has 4 bits for it
inline constexpr int64_t kMaxCommandBytes = (int64_t{1} << 32) - 1;
inline constexpr int64_t kMaxCommandAmount = (int64_t{1} << 32) - 1;
inline constexpr int64_t kMaxCommandSource = ((int64_t{1} << 31) - 1) * kCommandUnit;
inline constexpr int64_t kMaxCommandTarget = ((int64_t{1} << 32) - 1) * kCommandUnit;
inline constexpr int64_t kMaxStoreTarget = ((int64_t{1} << 47) - 1) * int64_t{sizeof(uint64_t)};

// A command's fields by name. A field that the kind does not have is 0.
struct CommandFields {
  CommandKind kind = CommandKind::kNone;
  int64_t peer = 0;     // write, signal, store
  int64_t counter = 0;  // write, signal
  int64_t bytes = 0;    // write
  int64_t amount = 0;   // signal
  int64_t source = 0;   // write: bytes from the start of this rank's memory, a multiple of 16
  // write, store: bytes from the start of the peer's memory, a multiple of 16 or of 8
  int64_t target = 0;
  uint64_t word = 0;  // store

  FANFOLD_HD constexpr bool operator==(const CommandFields& other) const {
    return kind == other.kind && peer == other.peer && counter == other.counter &&
           bytes == other.bytes && amount == other.amount && source == other.source &&
           target == other.target && word == other.word;
  }
};

enum class CommandField : int32_t {
  kFits,  // none of the fields: the command can be made
  kKind,
  kPeer,
  kCounter,
  kBytes,
  kAmount,
  kSource,
  kTarget,
  kWord,
};

// The largest value of a field in a command of this kind; 0 if the kind does not have the field.
FANFOLD_HD constexpr int64_t command_bound(CommandKind kind, CommandField field) {
  const bool write = kind == CommandKind::kWrite;
  const bool signal = kind == CommandKind::kSignal;
  const bool store = kind == CommandKind::kStore;
  switch (field) {
    case CommandField::kKind:
      return static_cast<int64_t>(CommandKind::kStore);
    case CommandField::kPeer:
      return has_peer(kind) ? kMaxCommandPeer : 0;
    case CommandField::kCounter:
      return write || signal ? kMaxCommandCounter : 0;
    case CommandField::kBytes:
      return write ? kMaxCommandBytes : 0;
    case CommandField::kAmount:
      return signal ? kMaxCommandAmount : 0;
    case CommandField::kSource:
      return write ? kMaxCommandSource : 0;
    case CommandField::kTarget:
      if (store) return kMaxStoreTarget;
      return write ? kMaxCommandTarget : 0;
    case CommandField::kWord:  // any, in a store
    case CommandField::kFits:
      break;
  }
  return 0;
}

// What an offset is a multiple of.
FANFOLD_HD constexpr int64_t command_unit(CommandKind kind) {
  return kind == CommandKind::kStore ? int64_t{sizeof(uint64_t)} : kCommandUnit;
}

// The value of a field.
FANFOLD_HD constexpr int64_t command_value(const CommandFields& fields, CommandField field) {
  switch (field) {
    case CommandField::kKind:
      return static_cast<int64_t>(fields.kind);
    case CommandField::kPeer:
      return fields.peer;
    case CommandField::kCounter:
      return fields.counter;
    case CommandField::kBytes:
      return fields.bytes;
    case CommandField::kAmount:
      return fields.amount;
    case CommandField::kSource:
      return fields.source;
    case CommandField::kTarget:
      return fields.target;
    case CommandField::kWord:
      return static_cast<int64_t>(fields.word);
    case CommandField::kFits:
      break;
  }
  return 0;
}

// The first field that is outside its bound or, for offsets, not a multiple of `command_unit`;
// kFits if there is none.
FANFOLD_HD constexpr CommandField misfit(const CommandFields& fields) {
  constexpr CommandField kChecked[] = {
      CommandField::kKind,   CommandField::kPeer,   CommandField::kCounter, CommandField::kBytes,
      CommandField::kAmount, CommandField::kSource, CommandField::kTarget,
  };
  for (const CommandField field : kChecked) {
    const int64_t value = command_value(fields, field);
    const bool offset = field == CommandField::kSource || field == CommandField::kTarget;
    if (value < 0 || value > command_bound(fields.kind, field)) return field;
    if (offset && value % command_unit(fields.kind) != 0) return field;
  }
  if (fields.kind != CommandKind::kStore && fields.word != 0) return CommandField::kWord;
  return CommandField::kFits;
}

struct alignas(16) Command {
  uint64_t words[2];

  // Makes `command` of `fields`. If a field does not fit, leaves `command` alone and returns the
  // field.
  FANFOLD_HD static constexpr CommandField make(const CommandFields& fields, Command& command) {
    const CommandField wrong = misfit(fields);
    if (wrong != CommandField::kFits) return wrong;
    const uint64_t head =
        static_cast<uint64_t>(fields.kind) << 1 | static_cast<uint64_t>(fields.peer) << 4;
    if (fields.kind == CommandKind::kStore) {
      const auto place = static_cast<uint64_t>(fields.target) / sizeof(uint64_t);
      command.words[0] = head | fields.word >> 63 << 16 | place << 17;
      command.words[1] = fields.word << 1;
      return wrong;
    }
    const bool signal = fields.kind == CommandKind::kSignal;
    const auto amount = static_cast<uint64_t>(signal ? fields.amount : fields.bytes);
    command.words[0] = head | static_cast<uint64_t>(fields.counter) << 16 | amount << 32;
    command.words[1] = static_cast<uint64_t>(fields.source / kCommandUnit) << 1 |
                       static_cast<uint64_t>(fields.target / kCommandUnit) << 32;
    return wrong;
  }

  // The fields, whatever the bits are. A reader of memory that others write checks `misfit` of them
  // before it uses them.
  FANFOLD_HD constexpr CommandFields fields() const {
    CommandFields out;
    out.kind = static_cast<CommandKind>(words[0] >> 1 & 7u);
    out.peer = static_cast<int64_t>(words[0] >> 4 & 0xfffu);
    if (out.kind == CommandKind::kStore) {
      out.word = words[1] >> 1 | words[0] >> 16 << 63;
      out.target = static_cast<int64_t>(words[0] >> 17) * int64_t{sizeof(uint64_t)};
      return out;
    }
    out.counter = static_cast<int64_t>(words[0] >> 16 & 0xffffu);
    const auto amount = static_cast<int64_t>(words[0] >> 32);
    (out.kind == CommandKind::kSignal ? out.amount : out.bytes) = amount;
    out.source = static_cast<int64_t>(words[1] >> 1 & 0x7fffffffu) * kCommandUnit;
    out.target = static_cast<int64_t>(words[1] >> 32) * kCommandUnit;
    return out;
  }

  // The same command with the lap bit of both words set to `lap`, 0 or 1.
  FANFOLD_HD constexpr Command with_lap(uint64_t lap) const {
    return {{(words[0] & ~uint64_t{1}) | lap, (words[1] & ~uint64_t{1}) | lap}};
  }
  // Whether both words have the lap bit `lap`: the slot holds the whole command of that lap.
  FANFOLD_HD constexpr bool has_lap(uint64_t lap) const {
    return (words[0] & 1u) == lap && (words[1] & 1u) == lap;
  }
};

static_assert(sizeof(Command) == 16 && alignof(Command) == 16);

namespace command_layout {

// The command of `fields`, or words that no command has if a field does not fit.
FANFOLD_HD constexpr Command of(const CommandFields& fields) {
  Command command{{~uint64_t{0}, ~uint64_t{0}}};
  return Command::make(fields, command) == CommandField::kFits ? command : Command{{1, 0}};
}

inline constexpr CommandFields kLargestWrite = {
    .kind = CommandKind::kWrite,
    .peer = kMaxCommandPeer,
    .counter = kMaxCommandCounter,
    .bytes = kMaxCommandBytes,
    .amount = 0,
    .source = kMaxCommandSource,
    .target = kMaxCommandTarget,
    .word = 0,
};

inline constexpr CommandFields kLargestStore = {
    .kind = CommandKind::kStore,
    .peer = kMaxCommandPeer,
    .counter = 0,
    .bytes = 0,
    .amount = 0,
    .source = 0,
    .target = kMaxStoreTarget,
    .word = ~uint64_t{0},
};

static_assert(of(kLargestWrite).words[0] == 0xffffffff000ffff2u);
static_assert(of(kLargestWrite).words[1] == 0xfffffffffffffffeu);
static_assert(of(kLargestWrite).fields() == kLargestWrite);
static_assert(of(kLargestWrite).with_lap(1).fields() == kLargestWrite);
static_assert(of(kLargestStore).words[0] == 0xfffffffffffffffau);
static_assert(of(kLargestStore).words[1] == 0xfffffffffffffffeu);
static_assert(of(kLargestStore).fields() == kLargestStore);
static_assert(of({CommandKind::kSignal, 1, 2, 0, 3, 0, 0, 0}).words[0] == 0x300020014u);
static_assert(of({CommandKind::kBarrier, 0, 0, 0, 0, 0, 0, 0}).words[0] == 8);

}  // namespace command_layout

}  // namespace fanfold
