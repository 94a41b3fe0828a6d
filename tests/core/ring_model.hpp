// Every interleaving of two producers and a consumer over a ring of two slots, access by access.
//
// The model runs the algorithm of protocol/ring.h itself. A `Recorder` is its memory: it answers
// the accesses of a call whose results are known, and notes the first one whose result is not. So
// the state of a thread is the list of results that its call has got so far, a step performs one
// access on the model's words, and states that have been seen are not explored again. A store of
// two words is two steps, in either order.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "protocol/ring.h"

namespace fanfold::ring_model {

inline constexpr uint64_t kSlots = 2;
inline constexpr uint64_t kProducers = 2;
inline constexpr uint64_t kPushes = 3;

// ---- accesses -----------------------------------------------------------------------------------

// The words of a ring that the algorithm touches.
enum Word : uint64_t {
  kNext,
  kCopy,
  kTail,
  kAbandoned,
  kFirstSlot,
  kWords = kFirstSlot + 2 * kSlots
};

enum class Operation { kNone, kLoad, kStore, kStorePair, kExchange, kAdd };

struct Access {
  Operation operation = Operation::kNone;
  uint64_t word = 0;
  uint64_t first = 0;   // the value to store or to add; of an exchange, the expected one
  uint64_t second = 0;  // of a pair and an exchange
};

// The results of the accesses that a call has made.
struct Results {
  static constexpr uint64_t kMost = 6;
  uint64_t count;
  uint64_t values[kMost];
};

inline const RingView& view() {
  static constexpr RingLayout kLayout{static_cast<int64_t>(kSlots)};
  alignas(kAreaAlignment) static std::array<std::byte, kLayout.bytes()> memory;
  static const RingView ring = kLayout.view(memory.data());
  return ring;
}

class Recorder {
 public:
  explicit Recorder(const Results& known) : known_(known) {}

  // The first access whose result is not known; kNone if the call has ended.
  const Access& next() const { return next_; }

  uint64_t load_relaxed_system(const uint64_t* word) {
    return answer({.operation = Operation::kLoad, .word = index(word)});
  }
  uint64_t load_acquire_system(const uint64_t* word) { return load_relaxed_system(word); }
  void store_release_system(uint64_t* word, uint64_t value) {
    answer({.operation = Operation::kStore, .word = index(word), .first = value});
  }
  void store_pair_release_system(uint64_t* words, uint64_t first, uint64_t second) {
    answer({Operation::kStorePair, index(words), first, second});
  }
  bool compare_exchange_relaxed_system(uint64_t* word, uint64_t& expected, uint64_t desired) {
    const uint64_t before = answer({Operation::kExchange, index(word), expected, desired});
    return std::exchange(expected, before) == before;
  }
  uint64_t fetch_add_relaxed_system(uint64_t* word, uint64_t value) {
    return answer({.operation = Operation::kAdd, .word = index(word), .first = value});
  }

 private:
  // What follows an access without a result does not matter: the call is made again.
  uint64_t answer(const Access& access) {
    if (position_ < known_.count) return known_.values[position_++];
    if (next_.operation == Operation::kNone) next_ = access;
    return 0;
  }
  static uint64_t index(const uint64_t* word) {
    const RingView& ring = view();
    if (word == &ring.head->next) return kNext;
    if (word == &ring.head->consumed) return kCopy;
    if (word == &ring.tail->consumed) return kTail;
    if (word == &ring.faults->abandoned) return kAbandoned;
    return kFirstSlot + static_cast<uint64_t>(word - ring.commands->words);
  }

  const Results& known_;
  uint64_t position_ = 0;
  Access next_;
};

// ---- states -------------------------------------------------------------------------------------

// How a producer gets its ticket.
enum class Way { kTryPush, kTicketFirst };
// When the consumer publishes: whenever it likes, any count; or all, once it finds no command.
enum class Publishes { kAnyTime, kWhenEmpty };
// What is broken, to see the model find it.
enum class Fault {
  kNone,
  kOneSlotMore,        // producers see a count of the consumer that is too large by one
  kHalfIsEnough,       // the consumer takes a command of which it has seen one word
  kRacyTicket,         // two producers may get the same ticket
  kPublishesTooEarly,  // the consumer publishes a command before it has read it
  kNeverPublishes,
};

struct Settings {
  uint64_t first = 0;
  std::array<Way, kProducers> ways{};
  Publishes publishes = Publishes::kAnyTime;
  Fault fault = Fault::kNone;
};

struct Thread {
  Results results;
  uint64_t stored;  // of a store of two words: bits of those that have been stored
};

struct ProducerState {
  Thread thread;
  uint64_t pushed;
  uint64_t has_ticket;
  uint64_t ticket;
};

struct ConsumerState {
  Thread thread;
  uint64_t popped;
  uint64_t finds_none;  // the last pop has
  uint64_t from[kProducers];
};

// Has no padding: states are compared as bytes.
struct State {
  uint64_t words[kWords];
  ProducerState producers[kProducers];
  ConsumerState consumer;

  bool operator==(const State& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
};
static_assert(std::has_unique_object_representations_v<State>);

struct HashState {
  size_t operator()(const State& state) const {
    return std::hash<std::string_view>{}({reinterpret_cast<const char*>(&state), sizeof state});
  }
};

struct Findings {
  size_t states = 0;
  std::string violation;  // empty if there is none
  size_t stuck = 0;       // states from which the end cannot be reached
};

// ---- exploration --------------------------------------------------------------------------------

class Model {
 public:
  explicit Model(const Settings& settings) : settings_(settings) {}

  // Explores every state. Stops at the first violation.
  Findings explore();

 private:
  State initial() const;
  bool is_end(const State& state) const;
  void add(const State& state);
  size_t count_stuck() const;

  void step_producer(const State& state, size_t which);
  void step_consumer(const State& state);
  void finish_pop(State state, bool popped, const Command& command);
  void publish(State state, uint64_t count);
  void perform(const State& state, Thread& (*of)(State&, size_t), size_t which,
               const Access& access);
  uint64_t perform_word(State& state, const Access& access) const;
  void check_overwrite(const State& state, size_t which, const Access& access);

  Settings settings_;
  std::unordered_map<State, uint32_t, HashState> known_;
  std::deque<const State*> waiting_;
  std::vector<const State*> states_;
  std::vector<std::pair<uint32_t, uint32_t>> edges_;
  uint32_t current_ = 0;
  std::string violation_;
};

// Bits of the command depend on producer and number in both words.
inline Command command_of(uint64_t producer, uint64_t number) {
  return {{2u | producer << 4 | (number + 1) << 32, producer << 1 | (number + 1) << 32}};
}

inline State Model::initial() const {
  State state{};
  state.words[kNext] = state.words[kCopy] = state.words[kTail] = settings_.first;
  for (uint64_t ticket = settings_.first; ticket != settings_.first + kSlots; ++ticket) {
    for (uint64_t i = 0; i < 2; ++i) {
      state.words[kFirstSlot + 2 * (ticket % kSlots) + i] = 1 - view().lap(ticket);
    }
  }
  state.consumer.popped = settings_.first;
  return state;
}

inline bool Model::is_end(const State& state) const {
  return state.words[kTail] == settings_.first + kProducers * kPushes;
}

inline void Model::add(const State& state) {
  const auto [entry, is_new] = known_.try_emplace(state, static_cast<uint32_t>(states_.size()));
  if (is_new) {
    states_.push_back(&entry->first);
    waiting_.push_back(&entry->first);
  }
  edges_.emplace_back(current_, entry->second);
}

inline Findings Model::explore() {
  add(initial());
  for (; !waiting_.empty() && violation_.empty(); waiting_.pop_front(), ++current_) {
    const State& state = *waiting_.front();
    for (size_t i = 0; i < kProducers; ++i) step_producer(state, i);
    step_consumer(state);
  }
  return {states_.size(), violation_, violation_.empty() ? count_stuck() : 0};
}

inline size_t Model::count_stuck() const {
  std::vector<std::vector<uint32_t>> before(states_.size());
  for (const auto& [from, to] : edges_) before[to].push_back(from);
  std::vector<bool> ends(states_.size());
  std::vector<uint32_t> open;
  const auto reach = [&](uint32_t state) {
    if (!ends[state]) open.push_back(state);
    ends[state] = true;
  };
  for (uint32_t i = 0; i < states_.size(); ++i) {
    if (is_end(*states_[i])) reach(i);
  }
  size_t reached = 0;
  for (; !open.empty(); ++reached) {
    const uint32_t state = open.back();
    open.pop_back();
    for (const uint32_t previous : before[state]) reach(previous);
  }
  return states_.size() - reached;
}

// ---- threads ------------------------------------------------------------------------------------

inline void Model::step_producer(const State& state, size_t which) {
  const ProducerState& producer = state.producers[which];
  if (producer.pushed == kPushes) return;
  Recorder memory(producer.thread.results);
  const Command command = command_of(which, producer.pushed);
  State after = state;
  ProducerState& own = after.producers[which];
  if (settings_.ways[which] == Way::kTryPush) {
    const RingPush push = ring_try_push(view(), memory, command);
    own.pushed += push.outcome == RingOutcome::kPushed ? 1 : 0;
  } else if (producer.has_ticket == 0) {
    own.ticket = ring_take_tickets(view(), memory, 1);
    own.has_ticket = 1;
  } else if (ring_try_store(view(), memory, producer.ticket, command)) {
    own.pushed += 1;
    own.has_ticket = own.ticket = 0;
  }
  if (memory.next().operation == Operation::kNone) {
    own.thread = {};
    return add(after);
  }
  if (memory.next().operation == Operation::kStorePair) {
    check_overwrite(state, which, memory.next());
  }
  perform(
      state, [](State& of, size_t i) -> Thread& { return of.producers[i].thread; }, which,
      memory.next());
}

inline void Model::check_overwrite(const State& state, size_t which, const Access& access) {
  const ProducerState& producer = state.producers[which];
  const bool tries = settings_.ways[which] == Way::kTryPush;
  const uint64_t ticket = tries ? producer.thread.results.values[0] : producer.ticket;
  if ((access.word - kFirstSlot) / 2 != ticket % kSlots) violation_ = "a ticket in another's slot";
  if (static_cast<int64_t>(ticket - kSlots - state.consumer.popped) >= 0) {
    violation_ = "a slot is overwritten before it is consumed";
  }
}

inline void Model::step_consumer(const State& state) {
  const ConsumerState& consumer = state.consumer;
  const bool between_calls = consumer.thread.results.count == 0;
  const uint64_t published = state.words[kTail];
  if (between_calls && settings_.fault != Fault::kNeverPublishes) {
    const bool early = settings_.fault == Fault::kPublishesTooEarly;
    const uint64_t most = consumer.popped + (early ? 1 : 0);
    if (settings_.publishes == Publishes::kAnyTime) {
      for (uint64_t count = published; count != most; ++count) publish(state, count + 1);
    } else if (consumer.finds_none != 0 && published != most) {
      return publish(state, most);
    }
  }
  Recorder memory(consumer.thread.results);
  Command command{};
  const bool popped = ring_load(view(), memory, consumer.popped, command);
  if (memory.next().operation == Operation::kNone) return finish_pop(state, popped, command);
  perform(state, [](State& of, size_t) -> Thread& { return of.consumer.thread; }, 0, memory.next());
}

inline void Model::finish_pop(State state, bool popped, const Command& command) {
  ConsumerState& consumer = state.consumer;
  consumer.thread = {};
  consumer.finds_none = popped ? 0 : 1;
  if (popped) {
    const uint64_t from = command.words[1] >> 1 & 0x7fffffffu;
    if (from >= kProducers) {
      violation_ = "a command that nobody has pushed";
      return;
    }
    const Command expected = command_of(from, consumer.from[from]);
    if (command.words[0] != expected.words[0] || command.words[1] != expected.words[1]) {
      violation_ = "a command is torn, lost, repeated or out of order";
    }
    consumer.from[from] += 1;
    consumer.popped += 1;
    if (consumer.from[from] > kPushes) violation_ = "more commands than were pushed";
  }
  add(state);
}

inline void Model::publish(State state, uint64_t count) {
  const Results none{};
  Recorder memory(none);
  ring_publish(view(), memory, count);
  perform_word(state, memory.next());
  state.consumer.finds_none = 0;
  add(state);
}

// ---- words --------------------------------------------------------------------------------------

// One access of a thread as one step; a store of two words as two, the first of which may be
// either.
inline void Model::perform(const State& state, Thread& (*of)(State&, size_t), size_t which,
                           const Access& access) {
  const auto finish = [&](State& after, uint64_t result) {
    Results& results = of(after, which).results;
    if (results.count == Results::kMost) {
      violation_ = "more accesses in a call than the model has room for";
      return;
    }
    results.values[results.count++] = result;
    of(after, which).stored = 0;
    add(after);
  };
  State after = state;
  if (access.operation != Operation::kStorePair) {
    return finish(after, perform_word(after, access));
  }
  const uint64_t stored = of(after, which).stored;
  for (uint64_t i = 0; i < 2; ++i) {
    if ((stored >> i & 1u) != 0) continue;
    State next = state;
    next.words[access.word + i] = i == 0 ? access.first : access.second;
    if (stored != 0) {
      finish(next, 0);
    } else {
      of(next, which).stored = 1u << i;
      add(next);
    }
  }
}

inline uint64_t Model::perform_word(State& state, const Access& access) const {
  uint64_t& word = state.words[access.word];
  const uint64_t before = word;
  const Fault fault = settings_.fault;
  switch (access.operation) {
    case Operation::kLoad:
      if (fault == Fault::kOneSlotMore && access.word == kTail) return before + 1;
      if (fault == Fault::kHalfIsEnough && access.word >= kFirstSlot && access.word % 2 == 1) {
        return (before & ~uint64_t{1}) | (state.words[access.word - 1] & 1u);
      }
      return before;
    case Operation::kStore:
      word = access.first;
      return 0;
    case Operation::kExchange:
      if (fault == Fault::kRacyTicket) {
        word = access.second;
        return access.first;
      }
      if (word == access.first) word = access.second;
      return before;
    case Operation::kAdd:
      word += access.first;
      return before;
    case Operation::kStorePair:
    case Operation::kNone:
      break;
  }
  return 0;
}

}  // namespace fanfold::ring_model
