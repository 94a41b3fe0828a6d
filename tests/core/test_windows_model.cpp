// Every order in which the messages and acknowledgements of a channel can land, complete and land
// again, tried on the windows themselves.
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <set>
#include <utility>
#include <vector>

#include "check.hpp"
#include "proxy/window.h"
#include "ranks.hpp"
#include "windows_model.hpp"

using namespace fanfold;

namespace {

using State = std::vector<ModelChannel>;  // of each direction

// Goes to every state that can be reached, and checks each. Returns their number.
size_t explore(const std::vector<ModelOptions>& directions) {
  State start;
  for (const ModelOptions& options : directions) start.emplace_back(options);
  std::set<State> seen{start};
  std::vector<const State*> open{&*seen.begin()};
  while (!open.empty()) {
    CHECK(seen.size() < 10'000'000);  // no endless path
    const State& state = *open.back();
    open.pop_back();
    bool stuck = true;
    bool done = true;
    for (size_t d = 0; d < directions.size(); ++d) {
      state[d].check(directions[d]);
      done = done && state[d].done(directions[d]);
      state[d].actions(directions[d], [&](const ModelChannel::Action& action) {
        stuck = false;
        State next = state;
        action(next[d]);
        const auto [place, added] = seen.insert(std::move(next));
        if (added) open.push_back(&*place);
      });
    }
    // No step leads back, so every path ends; it must not end before all is delivered and known.
    if (stuck) CHECK(done);
  }
  return seen.size();
}

// All orders of data and signals in `count` messages.
std::vector<std::vector<bool>> scripts(int count) {
  std::vector<std::vector<bool>> all;
  for (uint32_t bits = 0; bits < 1u << count; ++bits) {
    std::vector<bool>& script = all.emplace_back();
    for (int i = 0; i < count; ++i) script.push_back((bits >> i & 1) != 0);
  }
  return all;
}

}  // namespace

namespace {

// All states of one direction, for credits of one, several and all of the messages and bytes.
size_t explore_credits(const std::vector<bool>& script) {
  size_t states = 0;
  for (const int32_t messages : {1, 2, 3}) {
    for (const int64_t bytes : {int64_t{2}, int64_t{3}}) {
      states += explore({{.credit = {.messages = messages, .bytes = bytes},
                          .signals = script,
                          .first_sequence = 510}});
    }
  }
  return states;
}

}  // namespace

TEST(windows_hold_in_every_order_of_one_direction) {
  size_t states = 0;
  for (const std::vector<bool>& script : scripts(3)) states += explore_credits(script);
  std::cout << "windows of one direction: " << states << " states" << std::endl;
  CHECK(states > 10'000);
}

TEST(long_windows_hold_in_every_order_of_four_messages) {
  size_t states = 0;
  for (const std::vector<bool>& script : scripts(4)) states += explore_credits(script);
  std::cout << "windows of four messages: " << states << " states" << std::endl;
  CHECK(states > 1'000'000);
}

TEST(windows_hold_in_every_order_of_two_directions) {
  size_t states = 0;
  for (const std::vector<bool>& script : scripts(2)) {
    const ModelOptions there{.credit = {.messages = 1, .bytes = 2},
                             .signals = script,
                             .first_sequence = 254,
                             .copies = 1};
    const ModelOptions back{.credit = {.messages = 2, .bytes = 2},
                            .signals = {true, false},
                            .first_sequence = 511,
                            .copies = 1};
    states += explore({there, back});
  }
  std::cout << "windows of two directions: " << states << " states" << std::endl;
  CHECK(states > 1'000);
}

namespace {

// One long random walk with a window of full size, so that the numbers on the wire are used again
// and again while old copies may still land.
void walk(uint64_t seed, int32_t window, size_t messages) {
  Random random(seed);
  ModelOptions options{.credit = {.messages = window, .bytes = 1000},
                       .signals = {},
                       .first_sequence = random.next(),
                       .copies = 4};
  for (size_t i = 0; i < messages; ++i) options.signals.push_back(random.one_in(3));
  ModelChannel channel(options);
  const size_t bound = messages * 40;
  for (size_t steps = 0; !channel.done(options); ++steps) {
    CHECK(steps < bound);
    std::vector<ModelChannel::Action> choices;
    channel.actions(options,
                    [&](const ModelChannel::Action& action) { choices.push_back(action); });
    CHECK(!choices.empty());
    // Mostly the newest and the oldest writes: so the oldest message lingers.
    const auto last = static_cast<int32_t>(choices.size()) - 1;
    const int32_t choice = random.one_in(3)   ? random.between(std::max(0, last - 3), last)
                           : random.one_in(2) ? random.between(0, std::min(3, last))
                                              : random.between(0, last);
    choices[static_cast<size_t>(choice)](channel);
    if (random.one_in(64)) channel.check(options);
  }
  channel.check(options);
}

}  // namespace

TEST(windows_of_full_size_hold_while_numbers_wrap) {
  for (uint64_t seed = 0; seed < 8; ++seed) walk(seed, kMostInFlight, 600 / kRoundsShare + 300);
}
